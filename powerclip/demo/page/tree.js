"use strict";
// The caption's tree as nested chips. Text is always set as text, never as markup.

PC.element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};

PC.tree = (() => {
  // `handlers`: over(number), out(), pick(number).
  function show(container, grounding, pinned, handlers) {
    // Typing changes the tree at every key: the chip that has the focus keeps it.
    const focused = container.contains(document.activeElement) ? document.activeElement.dataset.phrase : null;
    container.replaceChildren();
    if (!grounding) return;
    const { caption, phrases, unread } = grounding;
    const children = phrases.map(() => []);
    phrases.forEach((phrase, number) => {
      if (phrase.parent !== null) children[phrase.parent].push(number);
    });

    function chip(number) {
      const phrase = phrases[number];
      const made = PC.element("span", {
        class: "chip", role: "treeitem", tabindex: "0", "data-phrase": number,
        "aria-selected": String(pinned === number), "aria-label": `phrase: ${phrase.text}`,
        title: "click to keep it and to see its best set of regions",
        onmouseover: (event) => { event.stopPropagation(); handlers.over(number); },
        onmouseleave: () => handlers.out(),
        onfocus: (event) => { event.stopPropagation(); handlers.over(number); },
        onblur: () => handlers.out(),
        onclick: (event) => { event.stopPropagation(); handlers.pick(number); },
        onkeydown: (event) => {
          if (event.target !== made) return;
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            handlers.pick(number);
          }
        },
      });
      if (pinned === number) made.classList.add("pinned");
      made.append(PC.element("span", { class: "kind", "aria-hidden": "true" }, phrase.label));
      let at = phrase.start;
      for (const child of children[number]) {
        words(made, caption.slice(at, phrases[child].start));
        made.append(chip(child));
        at = phrases[child].end;
      }
      words(made, caption.slice(at, phrase.end));
      return made;
    }

    function words(parent, text) {
      const trimmed = text.trim();
      if (trimmed) parent.append(PC.element("span", { class: "word" }, trimmed));
    }

    container.append(chip(0));
    if (unread) {
      container.append(PC.element("span", { class: "unread", title: "beyond what the model reads" }, unread));
    }
    if (focused !== null) container.querySelector(`[data-phrase="${focused}"]`)?.focus();
  }

  function mark(container, active) {
    for (const made of container.querySelectorAll(".chip")) {
      made.classList.toggle("active", made.dataset.phrase === String(active));
    }
  }

  // The phrase of another caption that stands where phrase `number` of this one does; null where there is none.
  function match(phrases, others, number) {
    if (number === null || !phrases[number]) return null;
    if (phrases.length === others.length) return number;
    const same = others.findIndex((other) => other.text.toLowerCase() === phrases[number].text.toLowerCase());
    return same >= 0 ? same : number === 0 ? 0 : null;
  }

  return { show, mark, match };
})();
