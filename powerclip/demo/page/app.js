"use strict";
// The page: what the visitor does becomes the state, the state a question, the answer pictures and numbers.

(() => {
  const { state } = PC.state;
  const $ = (id) => document.getElementById(id);
  const element = PC.element;
  let about = null; // what the server offers
  let answer = null; // the last answer, and
  let image = null; // its picture
  let hovered = null; // {row, number} while the pointer or the focus is on a chip
  let drawing = null; // the box that is being drawn
  let asking = false, again = false;

  PC.say = (text, bad = false) => {
    $("status").textContent = text;
    $("status").classList.toggle("bad", bad);
  };

  // ---- asking ------------------------------------------------------------------------------------------------------

  // One question at a time: what changes meanwhile is asked together afterwards.
  async function ask() {
    if (asking) {
      again = true;
      return;
    }
    asking = true;
    try {
      do {
        again = false;
        await askOnce();
      } while (again);
    } finally {
      asking = false;
    }
  }

  async function askOnce() {
    PC.state.write();
    if (state.view === "pairs") {
      await PC.pairs.ask(about);
      return;
    }
    const captions = [state.caption, ...(state.second.trim() ? [state.second] : [])];
    try {
      const shown = await load(state.picture);
      if (!state.caption.trim()) {
        answer = null;
        image = shown;
        render();
        PC.say("Write a caption to look for in the picture.");
        return;
      }
      if (state.regions === "boxes" && !PC.state.boxes().length) {
        image = shown;
        render();
        PC.say("Draw a box on a picture with the mouse, or write it below: each box is a region.");
        return;
      }
      const question = { picture: state.picture, captions, ...PC.state.settings() };
      const found = await PC.backend.ground(question);
      answer = { ...found, question, captions: captions.map((caption, at) => found.captions[Math.min(at, found.captions.length - 1)]) };
      image = shown;
      if (state.phrase === "first") state.phrase = firstPhrase(answer.captions[0][0].phrases);
      if (state.phrase !== "" && !answer.captions[0][0].phrases[Number(state.phrase)]) state.phrase = "";
      PC.state.write();
      PC.say("");
      render();
      document.body.dataset.answered = JSON.stringify(question); // for tests: what is shown now
    } catch (error) {
      if (!(error instanceof PC.backend.Problem)) throw error;
      PC.say(error.message, true);
    }
  }

  // What a new example shows at once: the first phrase of several words that holds no other.
  function firstPhrase(phrases) {
    const found = phrases.findIndex(({ text }, number) => text.includes(" ") && !phrases.some(({ parent }) => parent === number));
    return String(Math.max(0, found));
  }

  const images = new Map();
  function load(id) {
    if (!images.has(id)) {
      images.set(id, new Promise((resolve, reject) => {
        const made = new Image();
        made.onload = () => resolve(made);
        made.onerror = () => {
          images.delete(id);
          reject(new PC.backend.Problem("This picture is not here (any more): choose another, or upload it again."));
        };
        made.src = PC.backend.picture(id);
      }));
    }
    return images.get(id);
  }

  function change(values) {
    Object.assign(state, values);
    renderSettings();
    ask();
  }

  // ---- showing -----------------------------------------------------------------------------------------------------

  // Which phrase each caption's row shows: the one under the pointer, else the pinned one.
  function shownPhrases() {
    if (!answer) return [];
    const lists = answer.captions.map((models) => models[0].phrases);
    const pinned = state.phrase === "" ? null : Number(state.phrase);
    const focus = hovered || { row: 0, number: pinned };
    return lists.map((phrases, row) => {
      if (row === focus.row) return focus.number;
      return PC.tree.match(lists[focus.row], phrases, focus.number);
    });
  }

  // A model with a short context may lack a phrase that another has: found by its place.
  function phraseOf(models, model, number) {
    if (number === null) return null;
    const wanted = models[0].phrases[number];
    return model.phrases.find((phrase) => phrase.start === wanted.start && phrase.end === wanted.end) || null;
  }

  function render() {
    renderTrees();
    renderPanels();
    renderMoved();
  }

  function renderTrees() {
    for (const row of [0, 1]) {
      const models = answer && answer.captions[row];
      PC.tree.show($(`tree-${row}`), models ? models[0] : null, row === 0 && state.phrase !== "" ? Number(state.phrase) : null, {
        over: (number) => { hovered = { row, number }; renderPanels(); },
        out: () => { hovered = null; renderPanels(); },
        pick: (number) => {
          const target = row === 0 ? number : PC.tree.match(models[0] ? answer.captions[1][0].phrases : [], answer.captions[0][0].phrases, number);
          const next = target === null ? "" : String(target);
          state.phrase = state.phrase === next ? "" : next;
          PC.state.write();
          renderTrees();
          renderPanels();
        },
      });
    }
  }

  function renderPanels() {
    const numbers = shownPhrases();
    const rows = answer ? answer.captions : [null];
    [0, 1].forEach((row) => PC.tree.mark($(`tree-${row}`), numbers[row] ?? null));
    const maps = rows.map((models, row) => (models || []).map((model) => phraseOf(models, model, numbers[row])));
    const all = maps.flat().filter(Boolean).map((phrase) => phrase.heatmap);
    const shared = PC.draw.range(all);
    const pinned = state.phrase !== "" && (!hovered || hovered.number === Number(state.phrase));
    $("panels").style.setProperty("--models", about.models.length);
    ensureFigures(rows.length);
    rows.forEach((models, row) => about.models.forEach((name, column) => {
      const figure = $("panels").children[row].children[column];
      const phrase = maps[row][column] || null;
      const model = models ? models[column] : null;
      figure.classList.toggle("drawing", state.regions === "boxes");
      figure.querySelector(".phrase").textContent = phrase ? phrase.text : models ? models[column].caption : "";
      const canvas = figure.querySelector("canvas");
      if (image) {
        PC.draw.panel(canvas, image, model, {
          heatmap: phrase && phrase.heatmap,
          limits: state.own && phrase ? PC.draw.range([phrase.heatmap]) : shared,
          phrase: pinned ? phrase : null,
          boxes: state.regions === "boxes" ? PC.state.boxes() : [],
          draft: drawing,
        });
      }
      canvas.setAttribute("aria-label", phrase
        ? `${name}: similarity of the patches with “${phrase.text}”, score ${phrase.score.toFixed(3)} with regions ${phrase.best.map((at) => at + 1).join(", ") || "none"}`
        : `${name}: the picture`);
      renderSet(figure.querySelector(".set"), model, phrase, pinned);
    }));
    const known = all.length > 0;
    $("legend").hidden = !known;
    $("lowest").textContent = known && !state.own ? shared.lowest.toFixed(2) : "low";
    $("highest").textContent = known && !state.own ? shared.highest.toFixed(2) : "high";
    const first = maps[0] && maps[0].find(Boolean);
    $("shown").textContent = first ? `“${first.text}”${pinned ? " and its best set of regions" : ": where the models see it"}` : "Point at a phrase, click to keep it";
  }

  function ensureFigures(rows) {
    const panels = $("panels");
    while (panels.children.length > rows) panels.lastChild.remove();
    while (panels.children.length < rows) {
      const row = element("div", { class: "row" });
      for (const name of about.models) {
        const canvas = element("canvas", { role: "img", width: "16", height: "16" });
        row.append(element("figure", {},
          element("figcaption", {}, element("span", {}, name), element("span", { class: "phrase" })),
          canvas, element("div", { class: "set" })));
        drawable(canvas);
      }
      panels.append(row);
    }
  }

  // "0.47 = 0.25 (2) + 0.22 (8)" with a bar of the shares, and the scores of the pair.
  function renderSet(container, model, phrase, pinned) {
    container.replaceChildren();
    if (!model) return;
    if (phrase && pinned) {
      const parts = phrase.shares.map((share, region) => ({ share, region })).filter(({ share, region }) => phrase.best.includes(region) || Math.abs(share) >= 0.005);
      const total = parts.reduce((sum, { share }) => sum + Math.abs(share), 0) || 1;
      const sum = element("div", { class: "sum" }, element("b", {}, phrase.score.toFixed(2)), parts.length ? " = " : " = no region: the empty set fits best");
      parts.forEach(({ share, region }, at) => {
        const badge = element("span", { class: "badge" }, String(region + 1));
        badge.style.background = PC.regionColour(region);
        badge.style.color = "#101418";
        sum.append(element("span", { class: "part" }, `${at ? (share < 0 ? " − " : " + ") : share < 0 ? "−" : ""}${Math.abs(share).toFixed(2)} `, badge));
      });
      const bar = element("div", { class: "shares", "aria-hidden": "true" });
      for (const { share, region } of parts) {
        const piece = element("span");
        piece.style.width = `${(100 * Math.abs(share)) / total}%`;
        piece.style.background = PC.regionColour(region);
        bar.append(piece);
      }
      container.append(sum, bar);
    }
    const { clip, t2r, r2t, score } = model.scores;
    container.append(element("div", {
      class: "scores", title: "the cosine of the whole picture and caption; text to regions + regions to text, the mean over phrases of their best set and over sets of their best phrase",
    }, `whole pair: CLIP ${clip.toFixed(2)} · PowerCLIP ${score.toFixed(2)} = T→R ${t2r.toFixed(2)} + R→T ${r2t.toFixed(2)}`));
  }

  function renderMoved() {
    $("moved").hidden = !(answer && answer.captions.length > 1);
    if ($("moved").hidden) return;
    const [first, second] = answer.captions;
    const head = element("tr", {}, element("th", {}, "phrase"), element("th", {}, "becomes"));
    for (const model of first) {
      head.append(element("th", { class: "value" }, `${model.model}: score`), element("th", { class: "value", title: "how far the brightest patch moves, in % of the picture's side" }, "peak moves"));
    }
    const rows = first[0].phrases.map((phrase, number) => {
      const other = PC.tree.match(first[0].phrases, second[0].phrases, number);
      const row = element("tr", {}, element("td", {}, phrase.text));
      row.append(other === null ? element("td", {}, "–") : changed(phrase.text, second[0].phrases[other].text));
      first.forEach((model, column) => {
        const from = phraseOf(first, model, number), to = other === null ? null : phraseOf(second, second[column], other);
        if (!from || !to) {
          row.append(element("td", { class: "value" }, "–"), element("td", { class: "value" }, "–"));
          return;
        }
        const here = PC.draw.peak(from.heatmap), there = PC.draw.peak(to.heatmap);
        const distance = Math.hypot(here.x - there.x, here.y - there.y);
        row.append(element("td", { class: "value" }, `${from.score.toFixed(2)} → ${to.score.toFixed(2)}`),
          element("td", { class: "value" }, distance < 0.01 ? "stays" : `${Math.round(100 * distance)} %`));
      });
      return row;
    });
    $("moved-table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  function changed(before, after) {
    const known = new Set(before.toLowerCase().split(/\s+/));
    const cell = element("td");
    after.split(/\s+/).forEach((word) => cell.append(known.has(word.toLowerCase()) ? word : element("ins", {}, word), " "));
    return cell;
  }

  // ---- settings ----------------------------------------------------------------------------------------------------

  const NAMES = {
    random: "random boxes", superpixels: "superpixels", mobile_sam: "MobileSAM", boxes: "draw them",
    sum: "sum", mean: "mean", cosine: "cosine", relative: "relative", exact: "exact", nla: "NLA", none: "as they are", image: "less the mean",
  };
  const FORMULAS = {
    sum: "Sum, as the paper prints it: a set scores what its regions score together. Every region above zero belongs to the best set, however little it has to do with the phrase.",
    mean: "Mean, the default of this package: a set scores what its regions score on average, so one region alone is always best.",
    cosine: "Cosine: the angle between the phrase and the sum of the set. A region that does not belong lowers it, a second one that does raises it, unless the two look alike. All sets are tried.",
    relative: "Relative: the sum of what is left of each region's cosine without its mean over all phrases and without the phrase's mean over all regions. The best set is what the phrase prefers more than the other phrases do.",
  };

  function choices(label, key, values, disabled = () => false) {
    const group = element("div", { class: "choices", role: "group", "aria-label": label });
    for (const value of values) {
      const button = element("button", { type: "button", "aria-pressed": String(state[key] === value), "data-choice": value, onclick: () => change({ [key]: value }) }, NAMES[value] || value);
      button.disabled = disabled(value);
      group.append(button);
    }
    return element("div", { class: "setting" }, element("span", {}, label), group);
  }

  function field(label, attributes, onchange) {
    const id = `setting-${attributes.key}`;
    const input = element("input", { id, ...attributes });
    input.value = state[attributes.key];
    input.addEventListener("input", () => onchange(input.value));
    return element("div", { class: "setting" }, element("label", { for: id }, label), input);
  }

  function renderSettings() {
    const focused = document.activeElement;
    const path = focused && $("settings").contains(focused) ? [focused.id, focused.dataset.choice, focused.parentElement.getAttribute("aria-label")] : null;
    const saved = Boolean(PC.backend.examples);
    const parts = [choices("regions", "regions", saved ? PC.backend.examples.regions : about.regions)];
    if (state.regions === "boxes") {
      parts.push(field("boxes in % (left top right bottom; …)", { key: "boxes", type: "text", class: "boxes" }, (value) => { state.boxes = value; ask(); }));
      parts.push(element("div", { class: "setting" }, element("span", {}, "\u00a0"), element("button", { type: "button", onclick: () => change({ boxes: "" }) }, "clear")));
    } else {
      const turn = element("button", { type: "button", id: "turn", onclick: () => change({ seed: String((Number(state.seed) + 1) % (saved ? PC.backend.examples.seeds : 2 ** 32)) }) }, `↻ others (${state.seed})`);
      parts.push(element("div", { class: "setting" }, element("span", {}, "seed"), turn));
      if (!saved) parts.push(field(`${state.count} regions`, { key: "count", type: "range", min: 2, max: about.limits.regions }, (value) => change({ count: value })));
      if (state.regions === "random" && !saved) parts.push(field(`sides up to ${Math.round(100 * state.size)} %`, { key: "size", type: "range", min: 0.1, max: 1, step: 0.05 }, (value) => change({ size: value })));
    }
    parts.push(choices("score of a set", "score", about.similarities));
    parts.push(choices("over all sets", "sets", about.aggregations, (value) => value === "nla" && state.score === "cosine"));
    if (!saved) parts.push(choices("patches", "centre", ["none", "image"]));
    $("settings").replaceChildren(...parts);
    const sets = state.score === "cosine" ? "" : state.sets === "exact" ? ` Exact: over all ${state.regions === "boxes" ? "" : `2^${state.count} = ${(2 ** Number(state.count)).toLocaleString("en")} `}sets.` : " NLA: the paper's approximation, in time linear in the regions; see how R→T changes.";
    $("formula").textContent = FORMULAS[state.score] + sets;
    if (path) {
      const same = path[0] ? $(path[0]) : [...$("settings").querySelectorAll("button")].find((button) => button.dataset.choice === path[1] && button.parentElement.getAttribute("aria-label") === path[2]);
      same?.focus();
    }
    $("own").checked = Boolean(state.own);
  }

  // ---- pictures ----------------------------------------------------------------------------------------------------

  function renderPictures() {
    const chosen = (id) => String(id === state.picture);
    const thumbnails = about.pictures.map((picture) => element("button", {
      type: "button", class: "thumbnail", title: picture.title, "aria-label": picture.title, "aria-pressed": chosen(picture.id), "data-picture": picture.id,
      onclick: () => pick(picture),
    }, element("img", { src: PC.backend.thumbnail(picture.id), alt: "", loading: "lazy" })));
    if (!PC.backend.examples) {
      const input = element("input", { type: "file", accept: "image/*", class: "visually-hidden", id: "file", tabindex: "-1", "aria-label": "Picture file" });
      input.addEventListener("change", () => { upload(input.files[0]); input.value = ""; });
      thumbnails.push(input, element("button", { type: "button", class: "upload", onclick: () => input.click() }, "choose, drop or paste your own"));
    }
    $("pictures").replaceChildren(...thumbnails);
  }

  function pick(picture) {
    const values = { picture: picture.id, boxes: "" };
    // An example brings its caption, unless the visitor has written one.
    const examples = about.pictures.flatMap(({ caption, second }) => [caption, second]);
    if (picture.caption && (examples.includes(state.caption) || !state.caption.trim())) {
      Object.assign(values, { caption: picture.caption, phrase: "first" });
      if (state.second.trim()) values.second = picture.second;
    }
    Object.assign(state, values);
    fill();
    renderPictures();
    change({});
  }

  async function upload(file) {
    if (!file || PC.backend.examples) return;
    if (file.size > about.limits.bytes) {
      PC.say(`This file has ${Math.ceil(file.size / 2 ** 20)} MB: at most ${about.limits.bytes / 2 ** 20} MB are accepted.`, true);
      return;
    }
    PC.say("Reading the picture …");
    try {
      const picture = await PC.backend.upload(file);
      if (!about.pictures.some(({ id }) => id === picture.id)) about.pictures.push(picture);
      pick(picture);
    } catch (error) {
      if (!(error instanceof PC.backend.Problem)) throw error;
      PC.say(error.message, true);
    }
  }

  function drawable(canvas) {
    const place = (event) => {
      const area = canvas.getBoundingClientRect();
      return [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height].map((side) => Math.min(1, Math.max(0, side)));
    };
    let start = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (state.regions !== "boxes") return;
      canvas.setPointerCapture(event.pointerId);
      start = place(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!start) return;
      const end = place(event);
      drawing = [Math.min(start[0], end[0]), Math.min(start[1], end[1]), Math.max(start[0], end[0]), Math.max(start[1], end[1])];
      renderPanels();
    });
    canvas.addEventListener("pointerup", () => {
      const box = drawing;
      start = null;
      drawing = null;
      if (box && box[2] - box[0] > 0.02 && box[3] - box[1] > 0.02) {
        PC.state.setBoxes([...PC.state.boxes(), box].slice(-about.limits.regions));
        change({});
      } else renderPanels();
    });
  }

  // ---- the whole ---------------------------------------------------------------------------------------------------

  function fill() {
    $("caption").value = state.caption;
    $("second").value = state.second;
    const open = Boolean(state.second.trim());
    $("second-part").hidden = !open;
    $("compare").setAttribute("aria-expanded", String(open));
    $("compare").textContent = open ? "× no second caption" : "+ a second caption: what moves?";
    for (const view of ["phrases", "pairs"]) {
      $(view).hidden = state.view !== view;
      $(`view-${view}`).setAttribute("aria-pressed", String(state.view === view));
    }
  }

  function restore() {
    PC.state.read();
    if (!state.picture) {
      Object.assign(state, { picture: about.pictures[0].id });
      if (!state.caption) Object.assign(state, { caption: about.pictures.find(({ caption }) => caption)?.caption || "", phrase: "first" });
    }
    fill();
    renderPictures();
    renderSettings();
    PC.pairs.fill(about);
    ask();
  }

  function wire() {
    $("caption").addEventListener("input", () => { state.caption = $("caption").value; ask(); });
    $("second").addEventListener("input", () => { state.second = $("second").value; ask(); });
    $("compare").addEventListener("click", () => {
      const open = $("second-part").hidden;
      const example = about.pictures.find(({ id, caption }) => id === state.picture && caption === state.caption);
      state.second = open ? (example && example.second) || state.caption : "";
      fill();
      if (open) $("second").focus();
      ask();
    });
    $("own").addEventListener("change", () => { state.own = $("own").checked ? "1" : ""; PC.state.write(); renderPanels(); });
    for (const view of ["phrases", "pairs"]) {
      $(`view-${view}`).addEventListener("click", () => { state.view = view; fill(); ask(); });
    }
    $("theme").addEventListener("click", () => {
      const dark = document.documentElement.dataset.theme
        ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      document.documentElement.dataset.theme = dark ? "light" : "dark";
    });
    $("save-json").addEventListener("click", () => PC.save.json(state.view === "pairs" ? PC.pairs.answer() : answer));
    $("save-png").addEventListener("click", () => PC.save.png(state, $("panels"), about.models));
    addEventListener("hashchange", restore);
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && state.phrase !== "") { state.phrase = ""; PC.state.write(); renderTrees(); renderPanels(); }
    });
    addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
    addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("dropping");
      upload(event.dataTransfer.files[0]);
    });
    addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
      if (file) upload(file);
    });
    if (PC.backend.examples) {
      for (const id of ["caption", "second", "pair-captions"]) $(id).readOnly = true;
    }
  }

  PC.refresh = ask;
  PC.backend.about().then((given) => {
    about = given;
    $("about").textContent = `powerclip ${about.version}${PC.backend.examples ? ", saved with a few examples" : ""}`;
    PC.draw.bar($("bar"));
    wire();
    restore();
  }).catch(() => PC.say("The page cannot reach its server: is `powerclip demo` still running?", true));
})();
