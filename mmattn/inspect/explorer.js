"use strict";
// One page, no network: what the numbers say is put in with textContent and attributes only, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const SHOWN = 12;
  const now = { trace: 0, word: 0, layer: "all", view: "mean" };

  // Numbers from 0 to 1 are stored in 16 bits each.
  function numbers(packed) {
    if (packed === null) return null;
    const raw = atob(packed);
    const shares = new Float64Array(raw.length / 2);
    for (let i = 0; i < shares.length; i++) {
      shares[i] = (raw.charCodeAt(2 * i) + 256 * raw.charCodeAt(2 * i + 1)) / 65535;
    }
    return shares;
  }
  const traces = data.traces.map((one) => ({
    ...one,
    weights: numbers(one.weights),
    dropped: numbers(one.dropped),
  }));

  // The value of each source for the selected word, for the layer and the kind of weights that are chosen.
  function values(trace) {
    const s = trace.sources.length, l = trace.words.length, shares = new Array(s).fill(0);
    if (now.view === "dropped") {
      return shares.map((_, j) => trace.probability[now.word] - trace.dropped[now.word * s + j]);
    }
    const layers = now.layer === "all" ? trace.layers.map((_, n) => n) : [Number(now.layer)];
    const heads = now.view === "mean" ? [...Array(trace.heads).keys()] : [Number(now.view)];
    for (const n of layers) for (const h of heads) {
      const begin = ((n * trace.heads + h) * l + now.word) * s;
      for (let j = 0; j < s; j++) shares[j] += trace.weights[begin + j] / (layers.length * heads.length);
    }
    return shares;
  }

  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
  const signed = (share) => {
    const points = (100 * Math.abs(share)).toFixed(1);
    return `${points === "0.0" ? "±" : share > 0 ? "+" : "−"}${points} points`;
  };

  function make(kind, attributes = {}, text = null) {
    const svg = kind === "svg" || kind === "rect" || kind === "title";
    const element = svg ? document.createElementNS(SVG, kind) : document.createElement(kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    if (text !== null) element.textContent = text;
    return element;
  }

  function figures(trace, shares) {
    const word = JSON.stringify(trace.words[now.word]);
    const lines = [];
    if (trace.probability !== null) {
      const alone = trace.without === null ? "" : `, without the memory ${percent(trace.without[now.word])}`;
      lines.push(`${word}: probability ${percent(trace.probability[now.word])}${alone}`);
    } else {
      lines.push(word);
    }
    if (now.view === "dropped") {
      lines.push("shown: how the probability changes when that source is dropped");
    } else {
      const sum = shares.reduce((a, b) => a + b, 0);
      const entropy = shares.reduce((bits, w) => bits - (w > 0 ? (w / sum) * Math.log2(w / sum) : 0), 0);
      const whole = trace.queries === "words" ? `sum ${sum.toFixed(4)}, ${percent(Math.max(0, 1 - sum))} elsewhere`
        : `sum ${sum.toFixed(4)} over ${shares.length} sources`;
      lines.push(`${whole}; entropy ${entropy.toFixed(2)} of ${Math.log2(shares.length).toFixed(2)} bits`);
    }
    return lines.join("\n");
  }

  const number = (value) => now.view === "dropped" ? signed(-value) : percent(value, 2);

  // What the numbers above and beside mean, where they stand.
  function explained(trace) {
    const kind = trace.word_grid === null ? "word" : "patch";
    const lines = [];
    if (now.view !== "dropped") {
      const most = Math.log2(trace.sources.length).toFixed(2);
      lines.push(trace.queries === "words"
        ? `Sum: the share of its attention that these sources got together; what went elsewhere went to no source, ` +
          `such as a slot for “nothing here”.`
        : `Sum: each source divides its attention among the ${kind}${kind === "word" ? "s" : "es"}, and this adds up ` +
          `what this ${kind} got from all of them.`);
      lines.push(`Entropy: how evenly it is spread, from 0 bits (all on one source) to ${most} bits (the same on each).`);
    }
    if (trace.dropped !== null) lines.push(`Dropped: the model is asked again with that source masked.`);
    return lines.join("\n");
  }

  // The effect of dropping a source, where it is known and not what is shown anyway.
  function change(trace, j) {
    if (now.view === "dropped" || trace.dropped === null) return null;
    return `${signed(trace.dropped[now.word * trace.sources.length + j] - trace.probability[now.word])} if dropped`;
  }

  const label = (trace, j, value) => [number(value), change(trace, j)].filter((part) => part !== null).join(", ");

  function drawMap(trace, shares, most) {
    const [rows, columns] = trace.grid;
    const map = make("div", { class: "map" });
    if (trace.picture !== null) {
      map.append(make("img", { src: trace.picture, alt: `the picture of “${trace.title}”, under the weights` }));
    }
    const svg = make("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "img" });
    const best = shares.indexOf(Math.max(...shares));
    // Where patches attend to words, all have some weight on every word: their differences are what is drawn.
    const least = trace.queries === "sources" && most > Math.min(...shares) ? Math.min(...shares) : 0;
    svg.setAttribute("aria-label", `weights over the picture, most at ${trace.sources[best]}`);
    shares.forEach((value, j) => {
      const rect = make("rect", {
        x: j % columns, y: Math.floor(j / columns), width: 1, height: 1, class: value < 0 ? "less" : "more",
        "fill-opacity": (0.75 * (Math.abs(value) - least) / (most - least)).toFixed(4),
      });
      rect.append(make("title", {}, `${trace.sources[j]}: ${label(trace, j, value)}`));
      svg.append(rect);
    });
    map.append(svg);
    const words = now.view === "dropped" ? "orange: less probable without it, blue: more" : null;
    const legend = make("div", { class: "legend" }, words);
    if (now.view !== "dropped") {
      const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
      legend.append(make("span", {}, number(least)), ramp, make("span", {}, number(most)));
    }
    return [map, legend];
  }

  function drawChips(trace, shares, most) {
    const row = make("div", { class: "row", role: "list", "aria-label": "sources in their order" });
    shares.forEach((value, j) => {
      const chip = make("span", { class: `chip ${value < 0 ? "less" : "more"}`, role: "listitem" }, trace.sources[j]);
      chip.style.setProperty("--opacity", (0.75 * Math.abs(value) / most).toFixed(4));
      chip.setAttribute("title", label(trace, j, value));
      row.append(chip);
    });
    return row;
  }

  function drawList(trace, shares, most) {
    const order = shares.map((_, j) => j).sort((a, b) => Math.abs(shares[b]) - Math.abs(shares[a]));
    const items = order.slice(0, SHOWN).map((j) => {
      const item = make("li"), track = make("span", { class: "track", "aria-hidden": "true" });
      const bar = make("span", { class: `bar ${shares[j] < 0 ? "less" : "more"}` });
      bar.style.setProperty("--share", `${(100 * Math.abs(shares[j])) / most}%`);
      track.append(bar);
      item.append(make("span", { class: "number" }, number(shares[j])), track);
      item.append(make("span", { class: "name" }, trace.sources[j]));
      if (change(trace, j) !== null) item.append(make("span", { class: "change" }, change(trace, j)));
      return item;
    });
    if (order.length > SHOWN) items.push(make("li", { class: "rest" }, `… and ${order.length - SHOWN} more`));
    at("sources").replaceChildren(...items);
  }

  function draw() {
    const trace = traces[now.trace], shares = values(trace);
    const most = Math.max(1e-9, ...shares.map(Math.abs));
    at("figures").textContent = figures(trace, shares);
    at("explained").textContent = explained(trace);
    const short = trace.sources.length <= 80 && Math.max(...trace.sources.map((name) => name.length)) <= 16;
    at("picture").replaceChildren(
      ...(trace.grid !== null ? drawMap(trace, shares, most) : short ? [drawChips(trace, shares, most)] : [])
    );
    drawList(trace, shares, most);
    buttons.forEach((button, i) => {
      button.setAttribute("aria-pressed", String(i === now.word));
      button.tabIndex = i === now.word ? 0 : -1;
    });
  }

  // Leading spaces are left out, and a word of nothing but spaces is shown as a mark.
  const visible = (word) => word.trim() || word.replace(/\n/g, "↵").replace(/\s/g, "␣");

  function makeWord(trace, word, i) {
    const gain = trace.without === null ? 0 : trace.probability[i] - trace.without[i];
    const button = make("button", { type: "button", class: gain < 0 ? "less" : "more" }, visible(word));
    button.style.setProperty("--opacity", Math.abs(gain).toFixed(4));
    return button;
  }

  // A word that is a patch of a picture is shown as that patch.
  function makeTile(trace, word, i) {
    const [rows, columns] = trace.word_grid;
    const button = make("button", { type: "button", "aria-label": word, title: word });
    const offset = (index, count) => `${count > 1 ? (100 * index) / (count - 1) : 0}%`;
    if (trace.word_picture !== null) button.style.setProperty("background-image", `url("${trace.word_picture}")`);
    button.style.setProperty("background-size", `${100 * columns}% ${100 * rows}%`);
    button.style.setProperty("background-position",
      `${offset(i % columns, columns)} ${offset(Math.floor(i / columns), rows)}`);
    return button;
  }

  let buttons = [];
  function select(word) {
    if (word === now.word) return;
    now.word = word;
    draw();
  }

  function step(event) {
    const last = buttons.length - 1, grid = traces[now.trace].word_grid, row = grid === null ? 1 : grid[1];
    const to = { ArrowRight: now.word + 1, ArrowDown: now.word + row, ArrowLeft: now.word - 1, ArrowUp: now.word - row,
      Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to <= last) select(to);
    buttons[now.word].focus();
  }

  // Options of one group stand together, under its name.
  function fill(menu, options, chosen) {
    const groups = new Map();
    const items = options.flatMap(([value, text, group = ""]) => {
      const option = make("option", { value }, text), known = groups.get(group);
      const place = group === "" ? option : known || make("optgroup", { label: group });
      if (group !== "") place.append(option);
      groups.set(group, place);
      return place === known ? [] : [place];
    });
    menu.replaceChildren(...items);
    menu.value = options.some(([value]) => value === chosen) ? chosen : options[0][0];
    return menu.value;
  }

  function open(number) {
    const trace = traces[number];
    now.trace = number;
    now.word = 0;
    const layers = [["all", "all layers"], ...trace.layers.map((name, n) => [String(n), name])];
    now.layer = fill(at("layer"), layers, now.layer);
    const views = [["mean", "mean of the heads"]];
    if (trace.heads > 1) for (let h = 0; h < trace.heads; h++) views.push([String(h), `head ${h}`]);
    if (trace.dropped !== null) views.push(["dropped", "effect of dropping each"]);
    now.view = fill(at("view"), views, now.view);
    at("title").textContent = trace.title;
    buttons = trace.words.map((word, i) => {
      const button = trace.word_grid === null ? makeWord(trace, word, i) : makeTile(trace, word, i);
      button.addEventListener("mouseenter", () => select(i));
      button.addEventListener("focus", () => select(i));
      button.addEventListener("click", () => select(i));
      return button;
    });
    at("words").setAttribute("class", trace.word_grid === null ? "" : "tiles");
    at("words").style.setProperty("--columns", trace.word_grid === null ? 1 : trace.word_grid[1]);
    at("words").replaceChildren(...buttons);
    const kind = trace.word_grid === null ? "a word" : "a patch";
    const lines = trace.without === null ? "" : " An orange line: the memory makes it more probable; a blue one: less.";
    at("hint").textContent = `Point at ${kind}, or move with the arrow keys.${lines}`;
    choose();
  }

  // A counterfactual goes through every layer.
  function choose() {
    now.view = at("view").value;
    now.layer = at("layer").value;
    at("layer").disabled = now.view === "dropped";
    draw();
  }

  at("notes").textContent = data.notes.join("\n");
  at("words").addEventListener("keydown", step);
  at("trace").addEventListener("change", () => open(Number(at("trace").value)));
  at("layer").addEventListener("change", choose);
  at("view").addEventListener("change", choose);
  const names = traces.map((trace, i) =>
    [String(i), `${i + 1}. ${trace.title || trace.words.join(" ")}`.slice(0, 80), data.groups[i]]);
  fill(at("trace"), names, "0");
  open(0);
})();
