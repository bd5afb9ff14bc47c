"use strict";
// Colours: a scale from dark blue over grey to light yellow, and a hue for each region.
// The scale is a straight line in OKLab along lightness and the blue-yellow axis, which people who cannot tell red from
// green see as others do; its lightness rises evenly, so that it also reads in grey.
const PC = window.PC || (window.PC = {});

PC.scale = (() => {
  const from = [0.27, -0.015, -0.105], to = [0.95, -0.035, 0.165];

  function linear(l, a, b) {
    const x = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const y = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const z = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
    return [
      4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z,
      -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
      -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z,
    ];
  }

  function encode(value) {
    const light = Math.min(1, Math.max(0, value));
    return Math.round(255 * (light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055));
  }

  const table = Array.from({ length: 256 }, (_, step) => {
    const share = step / 255;
    return linear(...from.map((start, axis) => start + share * (to[axis] - start))).map(encode);
  });

  function colour(share) {
    return table[Math.round(255 * Math.min(1, Math.max(0, Number.isFinite(share) ? share : 0)))];
  }

  function css(share) {
    return `rgb(${colour(share).join(" ")})`;
  }

  // Black or white, whichever is easier to read on the colour.
  function ink(share) {
    return share > 0.45 ? "#101418" : "#ffffff";
  }

  return { colour, css, ink };
})();

// Okabe and Ito's colours, which stay apart for colour-blind people; the number on a region says the rest.
PC.regionColours = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#3f8fd2", "#d55e00", "#cc79a7", "#f4f4f4"];
PC.regionColour = (region) => PC.regionColours[region % PC.regionColours.length];
