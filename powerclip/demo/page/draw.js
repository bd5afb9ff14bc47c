"use strict";
// A picture on a canvas with a heatmap over the part that the model sees, and regions as outlines of their patches.

PC.draw = (() => {
  const greys = new Map();

  // The picture without its colours, so that they are not mistaken for the heatmap's.
  function grey(image) {
    if (!greys.has(image)) {
      const canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
      const context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
      for (let at = 0; at < pixels.data.length; at += 4) {
        const light = 0.299 * pixels.data[at] + 0.587 * pixels.data[at + 1] + 0.114 * pixels.data[at + 2];
        pixels.data.fill(light, at, at + 3);
      }
      context.putImageData(pixels, 0, 0);
      if (greys.size > 24) greys.clear();
      greys.set(image, canvas);
    }
    return greys.get(image);
  }

  function range(heatmaps) {
    let lowest = Infinity, highest = -Infinity;
    for (const heatmap of heatmaps) {
      for (const row of heatmap) {
        for (const value of row) {
          lowest = Math.min(lowest, value);
          highest = Math.max(highest, value);
        }
      }
    }
    return { lowest, highest };
  }

  function heat(context, heatmap, rectangle, limits) {
    const rows = heatmap.length, columns = heatmap[0].length;
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = rows;
    const pixels = small.getContext("2d").createImageData(columns, rows);
    heatmap.forEach((row, y) => row.forEach((value, x) => {
      const share = (value - limits.lowest) / Math.max(1e-9, limits.highest - limits.lowest);
      const at = 4 * (y * columns + x);
      pixels.data.set(PC.scale.colour(share), at);
      pixels.data[at + 3] = 255 * (0.45 + 0.25 * share);
    }));
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.save();
    context.beginPath();
    context.rect(rectangle.x, rectangle.y, rectangle.width, rectangle.height);
    context.clip();
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(small, rectangle.x, rectangle.y, rectangle.width, rectangle.height);
    context.restore();
  }

  function peak(heatmap) {
    let best = { value: -Infinity, x: 0, y: 0 };
    heatmap.forEach((row, y) => row.forEach((value, x) => {
      if (value > best.value) best = { value, x: (x + 0.5) / row.length, y: (y + 0.5) / heatmap.length };
    }));
    return best;
  }

  function cross(context, x, y, size) {
    for (const [colour, width] of [["#101418", size * 0.45], ["#ffffff", size * 0.2]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x - size, y);
      context.lineTo(x + size, y);
      context.moveTo(x, y - size);
      context.lineTo(x, y + size);
      context.stroke();
    }
  }

  // The edges of a region's patches that have no patch of the region on the other side.
  function outline(context, cells, grid, rectangle, inset) {
    const [rows, columns] = grid;
    const inside = new Set(cells);
    const width = rectangle.width / columns, height = rectangle.height / rows;
    const has = (row, column) => row >= 0 && row < rows && column >= 0 && column < columns && inside.has(row * columns + column);
    const line = (x0, y0, x1, y1) => { context.moveTo(x0, y0); context.lineTo(x1, y1); };
    context.beginPath();
    for (const cell of cells) {
      const row = Math.floor(cell / columns), column = cell % columns;
      const left = rectangle.x + column * width, top = rectangle.y + row * height;
      const right = left + width, bottom = top + height;
      // Moved inwards a little by each region's number, so that outlines on the same edge stay apart. A line ends where
      // the next one begins: further inside at an outer corner, further outside at an inner one.
      const up = has(row - 1, column), down = has(row + 1, column), west = has(row, column - 1), east = has(row, column + 1);
      const end = (open, diagonal) => (open ? inset : diagonal ? -inset : 0);
      if (!up) line(left + end(!west, has(row - 1, column - 1)), top + inset, right - end(!east, has(row - 1, column + 1)), top + inset);
      if (!down) line(left + end(!west, has(row + 1, column - 1)), bottom - inset, right - end(!east, has(row + 1, column + 1)), bottom - inset);
      if (!west) line(left + inset, top + end(!up, has(row - 1, column - 1)), left + inset, bottom - end(!down, has(row + 1, column - 1)));
      if (!east) line(right - inset, top + end(!up, has(row - 1, column + 1)), right - inset, bottom - end(!down, has(row + 1, column + 1)));
    }
  }

  function label(context, text, x, y, size, colour) {
    context.font = `700 ${size}px system-ui, sans-serif`;
    const width = Math.max(size * 1.5, context.measureText(text).width + size * 0.7), height = size * 1.45;
    context.fillStyle = colour;
    context.strokeStyle = "#101418";
    context.lineWidth = size * 0.1;
    context.beginPath();
    context.roundRect(x, y, width, height, height / 2);
    context.fill();
    context.stroke();
    context.fillStyle = "#101418";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + width / 2, y + height / 2 + size * 0.05);
    return { x, y, width, height };
  }

  // Regions of the best set with their shares; `faint` ones are the others.
  function regions(context, grounding, chosen, shares, rectangle, unit) {
    const taken = [];
    const [rows, columns] = grounding.grid;
    grounding.regions.forEach((cells, number) => {
      const best = chosen.includes(number);
      outline(context, cells, grounding.grid, rectangle, best ? unit * (0.4 + 0.35 * (number % 4)) : 0);
      context.setLineDash(best ? [] : [unit, unit]);
      for (const [colour, width] of best
        ? [["#101418", unit * 1.15], [PC.regionColour(number), unit * 0.7]]
        : [["rgb(255 255 255 / 0.5)", unit * 0.25]]) {
        context.strokeStyle = colour;
        context.lineWidth = width;
        context.lineCap = "square";
        context.stroke();
      }
    });
    context.setLineDash([]);
    for (const number of chosen) {
      const cells = grounding.regions[number];
      const top = Math.floor(Math.min(...cells) / columns);
      const left = Math.min(...cells.filter((cell) => Math.floor(cell / columns) === top).map((cell) => cell % columns));
      let x = rectangle.x + (left * rectangle.width) / columns + unit, y = rectangle.y + (top * rectangle.height) / rows + unit;
      // Where labels would lie on each other the later one stands below.
      const size = unit * 3.6;
      while (taken.some((other) => Math.abs(other.x - x) < other.width && Math.abs(other.y - y) < other.height)) y += size * 1.5;
      taken.push(label(context, `${number + 1}`, x, y, size, PC.regionColour(number)));
    }
  }

  // All of it. `view` is the part of the picture under the grid, in shares of the picture.
  function panel(canvas, image, grounding, options) {
    const longest = 720;
    const scale = longest / Math.max(image.naturalWidth, image.naturalHeight);
    canvas.width = Math.round(image.naturalWidth * scale);
    canvas.height = Math.round(image.naturalHeight * scale);
    const context = canvas.getContext("2d");
    // Lines and numbers keep their size on a small screen, where the canvas is shown smaller than it is.
    const unit = (longest / 140) * Math.min(1.9, Math.max(1, 400 / Math.max(1, canvas.clientWidth)));
    const { heatmap, limits, phrase, boxes, draft } = options;
    context.drawImage(heatmap ? grey(image) : image, 0, 0, canvas.width, canvas.height);
    if (grounding) {
      const [left, top, right, bottom] = grounding.view;
      const rectangle = {
        x: left * canvas.width, y: top * canvas.height,
        width: (right - left) * canvas.width, height: (bottom - top) * canvas.height,
      };
      // What the model does not see is dimmed.
      context.fillStyle = "rgb(20 23 27 / 0.55)";
      context.beginPath();
      context.rect(0, 0, canvas.width, canvas.height);
      context.rect(rectangle.x, rectangle.y, rectangle.width, rectangle.height);
      context.fill("evenodd");
      if (heatmap) {
        heat(context, heatmap, rectangle, limits);
        if (phrase) {
          regions(context, grounding, phrase.best, phrase.shares, rectangle, unit);
        }
        const highest = peak(heatmap);
        cross(context, rectangle.x + highest.x * rectangle.width, rectangle.y + highest.y * rectangle.height, unit * 2.2);
      }
    }
    const marked = [...(heatmap ? [] : boxes || []), ...(draft ? [draft] : [])];
    for (const [x0, y0, x1, y1] of marked) {
      for (const [colour, width] of [["#101418", unit], ["#ffffff", unit * 0.5]]) {
        context.strokeStyle = colour;
        context.lineWidth = width;
        context.strokeRect(x0 * canvas.width, y0 * canvas.height, (x1 - x0) * canvas.width, (y1 - y0) * canvas.height);
      }
    }
  }

  function bar(canvas) {
    const context = canvas.getContext("2d");
    for (let at = 0; at < canvas.width; at += 1) {
      context.fillStyle = PC.scale.css(at / (canvas.width - 1));
      context.fillRect(at, 0, 1, 1);
    }
  }

  return { panel, range, bar, peak };
})();
