"use strict";
// All pairs: a few captions against a few pictures, as matrices of CLIP's and PowerCLIP's scores. And what can be kept.

PC.pairs = (() => {
  const { state } = PC.state;
  const $ = (id) => document.getElementById(id);
  const element = PC.element;
  let last = null;

  const lines = (text) => [...new Set(text.split("\n").map((line) => line.trim()).filter(Boolean))];

  // The first few examples, each picture with its caption.
  function fill(about) {
    const examples = about.pictures.filter(({ caption }) => caption).slice(0, 4);
    const chosen = new Set(state.pictures ? state.pictures.split(" ") : examples.map(({ id }) => id));
    $("pair-captions").value = state.captions || examples.map(({ caption }) => caption).join("\n");
    $("pair-captions").oninput = () => { state.captions = $("pair-captions").value; PC.refresh(); };
    $("pair-pictures").replaceChildren(...about.pictures.map((picture) => element("button", {
      type: "button", class: "thumbnail", title: picture.title, "aria-label": picture.title, "aria-pressed": String(chosen.has(picture.id)),
      onclick: (event) => {
        if (PC.backend.examples) return;
        if (chosen.has(picture.id)) chosen.delete(picture.id);
        else chosen.add(picture.id);
        event.currentTarget.setAttribute("aria-pressed", String(chosen.has(picture.id)));
        state.pictures = [...chosen].join(" ");
        PC.refresh();
      },
    }, element("img", { src: PC.backend.thumbnail(picture.id), alt: "" }))));
    fill.chosen = () => about.pictures.map(({ id }) => id).filter((id) => chosen.has(id));
  }

  async function ask(about) {
    const captions = lines($("pair-captions").value), pictures = fill.chosen();
    if (!captions.length || !pictures.length) {
      PC.say("Choose at least one picture and write at least one caption.");
      return;
    }
    if (captions.length > about.limits.captions || pictures.length > about.limits.pictures) {
      PC.say(`At most ${about.limits.captions} captions and ${about.limits.pictures} pictures.`, true);
      return;
    }
    try {
      const settings = PC.state.settings();
      // Boxes are drawn on one picture: they mean nothing on another.
      if (settings.regions.kind === "boxes") Object.assign(settings.regions, { kind: "random", boxes: [] });
      last = await PC.backend.pairs({ pictures, captions, ...settings });
      PC.say("");
      show();
      document.body.dataset.pairs = JSON.stringify(last.captions);
    } catch (error) {
      if (!(error instanceof PC.backend.Problem)) throw error;
      PC.say(error.message, true);
    }
  }

  function show() {
    $("matrices").replaceChildren(...last.models.map((model) => element("section", {},
      element("h2", {}, model.model),
      element("div", { class: "both" }, matrix("CLIP: cosine of the whole", model.clip), matrix("PowerCLIP: phrases and sets of regions", model.score)))));
  }

  function matrix(title, values) {
    const all = values.flat(), lowest = Math.min(...all), highest = Math.max(...all);
    const head = element("tr", {}, element("th"), ...last.pictures.map((id) => element("th", {}, element("img", { src: PC.backend.thumbnail(id), alt: id }))));
    const rows = values.map((row, at) => {
      const best = row.indexOf(Math.max(...row));
      return element("tr", {}, element("th", { class: "caption", scope: "row" }, last.captions[at]), ...row.map((value, column) => {
        const share = (value - lowest) / Math.max(1e-9, highest - lowest);
        const cell = element("td", { class: column === best ? "best" : "" }, value.toFixed(2));
        cell.style.background = PC.scale.css(share);
        cell.style.color = PC.scale.ink(share);
        if (column === best) cell.style.outlineColor = PC.scale.ink(share);
        return cell;
      }));
    });
    return element("div", { class: "scroll" }, element("p", {}, title), element("table", { class: "matrix" }, element("thead", {}, head), element("tbody", {}, ...rows)));
  }

  return { fill, ask, answer: () => last };
})();

PC.save = (() => {
  function download(blob, name) {
    const link = PC.element("a", { href: URL.createObjectURL(blob), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  function json(answer) {
    download(new Blob([JSON.stringify(answer, null, 1)], { type: "application/json" }), "powerclip.json");
  }

  // The panels as they are, with caption, phrase, names and scores written around them.
  function png(state, panels, models) {
    const gap = 24, side = 560, text = 30;
    const rows = [...panels.children].map((row) => [...row.querySelectorAll("figure")]);
    const heights = rows.map((row) => Math.max(...row.map((figure) => {
      const canvas = figure.querySelector("canvas");
      return (side * canvas.height) / canvas.width;
    })));
    const canvas = document.createElement("canvas");
    canvas.width = gap + models.length * (side + gap);
    canvas.height = gap + rows.length * (4 * text + gap) + heights.reduce((sum, height) => sum + height, 0);
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--ground");
    context.fillRect(0, 0, canvas.width, canvas.height);
    let top = gap;
    rows.forEach((row, at) => {
      write(at === 0 ? state.caption : state.second, gap, top, canvas.width - 2 * gap, "600 24px");
      row.forEach((figure, column) => {
        const left = gap + column * (side + gap), from = figure.querySelector("canvas");
        const phrase = figure.querySelector(".phrase").textContent;
        write(`${models[column]}: ${phrase}`, left, top + text * 1.2, side, "20px");
        context.drawImage(from, left, top + 2.2 * text, side, (side * from.height) / from.width);
        const sum = figure.querySelector(".sum");
        write(sum ? sum.textContent : "", left, top + 2.3 * text + heights[at], side, "20px");
      });
      top += heights[at] + 4 * text + gap;
    });
    canvas.toBlob((blob) => download(blob, "powerclip.png"), "image/png");

    function write(words, x, y, width, font) {
      context.font = `${font} system-ui, sans-serif`;
      context.fillStyle = style.getPropertyValue("--ink");
      context.textBaseline = "top";
      context.fillText(words, x, y, width);
    }
  }

  return { json, png };
})();
