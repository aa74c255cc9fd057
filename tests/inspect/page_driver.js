// Uses a page in the stand-in of page_shim.js as a reader does in a browser, and notes what is seen after each step.
(() => {
  const at = (id) => document.getElementById(id);
  const fire = (target, kind, more = {}) =>
    target.dispatchEvent(Object.assign(new Event(kind, { bubbles: true }), more));
  const press = (...keys) => keys.forEach((key) => fire(document.activeElement, "keydown", { key }));
  const choose = (id, value) => { at(id).value = value; fire(at(id), "change"); };
  const steps = {
    first: () => {},
    hover: () => fire(at("words").children[1], "mouseenter"),
    right: () => { at("words").children[1].focus(); press("ArrowRight"); },
    end: () => press("End", "ArrowRight"),
    layer: () => { press("Home"); choose("layer", "1"); },
    head: () => choose("view", "4"),
    dropped: () => choose("view", "dropped"),
    other: () => choose("trace", "1"),
    tiles: () => choose("trace", "2"),
    below: () => { at("words").children[0].focus(); press("ArrowDown"); },
  };
  const found = {};
  for (const [name, step] of Object.entries(steps)) { step(); found[name] = seen(); }
  process.stdout.write(JSON.stringify(found));
})();
