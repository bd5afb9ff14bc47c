"use strict";
// The view as one object, kept in the address: whoever opens the address sees the same.

PC.state = (() => {
  const defaults = {
    view: "phrases", picture: "", caption: "", second: "", phrase: "", regions: "random", count: "10", seed: "0",
    size: "0.5", boxes: "", score: "cosine", sets: "exact", centre: "none", own: "", pictures: "", captions: "",
  };
  const state = { ...defaults };

  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const key of Object.keys(defaults)) state[key] = given.get(key) ?? defaults[key];
  }

  function write() {
    const shown = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) {
      if (value !== defaults[key]) shown.set(key, value);
    }
    history.replaceState(null, "", `#${shown}`);
  }

  // Boxes are written in per cent: "10 20 50 60; …".
  function boxes() {
    return state.boxes.split(";").map((box) => box.trim().split(/[\s,]+/).map((side) => Number(side) / 100))
      .filter((box) => box.length === 4 && box.every(Number.isFinite))
      .map((box) => box.map((side) => Math.min(1, Math.max(0, side))));
  }

  function setBoxes(list) {
    state.boxes = list.map((box) => box.map((side) => Math.round(side * 100)).join(" ")).join("; ");
  }

  function settings() {
    return {
      regions: {
        kind: state.regions, count: Number(state.count), seed: Number(state.seed), largest: Number(state.size),
        boxes: state.regions === "boxes" ? boxes() : [],
      },
      similarity: state.score, aggregation: state.score === "cosine" ? "exact" : state.sets, centre: state.centre,
    };
  }

  return { state, read, write, boxes, setBoxes, settings };
})();

// Where answers come from: the server, or the examples that were saved with the page.
PC.backend = (() => {
  const saved = document.getElementById("saved-examples");
  const examples = saved ? JSON.parse(saved.textContent) : null;

  class Problem extends Error {}

  async function post(path, body, type) {
    for (let attempt = 0; ; attempt += 1) {
      let response;
      try {
        response = await fetch(path, { method: "POST", body, headers: { "Content-Type": type } });
      } catch {
        throw new Problem("The server does not answer: is `powerclip demo` still running?");
      }
      if (response.status === 503 && attempt < 30) {
        PC.say("The models are busy, asking again …");
        await new Promise((resolve) => { setTimeout(resolve, 1000 * Number(response.headers.get("Retry-After") || 1)); });
        continue;
      }
      const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
      if (!response.ok) throw new Problem(answer.error);
      return answer;
    }
  }

  // Maps do not depend on regions and scores: they are saved once for each caption.
  function recall(question) {
    const key = PC.savedKey(question);
    const answer = examples.answers[key];
    if (!answer) throw new Problem("This page was saved with a few examples: `powerclip demo` answers all questions.");
    return {
      picture: question.picture,
      captions: question.captions.map((caption) => answer[caption].map((found, model) => {
        const maps = examples.maps[`${question.picture}\n${caption}\n${model}`];
        return {
          ...found, heatmap: maps[0], phrases: found.phrases.map((phrase, at) => ({ ...phrase, heatmap: maps[at + 1] })),
        };
      })),
    };
  }

  return {
    examples,
    Problem,
    about: async () => (examples ? examples.about : (await fetch("api/about")).json()),
    picture: (id) => (examples ? examples.pictures[id] : `picture/${encodeURIComponent(id)}`),
    thumbnail: (id) => (examples ? examples.pictures[id] : `thumbnail/${encodeURIComponent(id)}`),
    ground: async (question) => (examples ? recall(question) : post("api/ground", JSON.stringify(question), "application/json")),
    pairs: async (question) => (examples ? examples.pairs : post("api/pairs", JSON.stringify(question), "application/json")),
    upload: async (file) => post("api/pictures", file, "application/octet-stream"),
  };
})();

PC.savedKey = (question) => {
  const { regions } = question;
  return [question.picture, regions.kind, regions.seed, question.similarity, question.aggregation].join("|");
};
