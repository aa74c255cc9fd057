// Uses a page as a reader does, in a browser or in the stand-in of page_shim.js, and notes what is seen.
(() => {
  const at = (id) => document.getElementById(id);
  const words = () => Array.from(at("words").children);
  const fire = (target, kind, more = {}) =>
    target.dispatchEvent(Object.assign(new Event(kind, { bubbles: true, cancelable: true }), more));
  const walk = (node) => [node, ...Array.from(node.children).flatMap(walk)];
  const seen = () => ({
    pressed: words().findIndex((one) => one.getAttribute("aria-pressed") === "true"),
    tabs: words().filter((one) => one.tabIndex === 0).length,
    figures: at("figures").textContent,
    sources: Array.from(at("sources").children).map((one) => one.textContent),
    rects: walk(at("picture")).filter((one) => one.tagName === "rect").map((one) => one.getAttribute("fill-opacity")),
    label: walk(at("picture")).map((one) => one.getAttribute("aria-label")).find((one) => one) || null,
    chips: walk(at("picture")).filter((one) => (one.getAttribute("class") || "").startsWith("chip"))
      .map((one) => one.textContent),
    layers: Array.from(at("layer").children).map((one) => one.textContent),
    views: Array.from(at("view").children).map((one) => one.textContent),
    locked: at("layer").disabled,
  });
  const choose = (id, value) => { at(id).value = value; fire(at(id), "change"); };
  const found = { notes: at("notes").textContent, words: words().map((one) => one.textContent), first: seen() };
  fire(words()[1], "mouseenter");
  found.hover = seen();
  fire(words()[1], "keydown", { key: "ArrowRight" });
  found.right = seen();
  found.focused = words().indexOf(document.activeElement);
  fire(words()[2], "keydown", { key: "End" });
  fire(words()[2], "keydown", { key: "ArrowRight" });
  found.end = seen();
  fire(words()[2], "keydown", { key: "Home" });
  choose("layer", "1");
  found.layer = seen();
  choose("view", "4");
  found.head = seen();
  choose("view", "rollout");
  found.rollout = seen();
  choose("view", "dropped");
  found.dropped = seen();
  choose("trace", "1");
  found.other = { ...seen(), title: at("title").textContent, names: words().map((one) => one.textContent) };
  found.elements = Array.from(new Set(walk(at("words")).concat(walk(at("picture")), walk(at("sources")))
    .map((one) => one.tagName.toLowerCase()))).sort();
  found.fetched = typeof performance === "object" && performance.getEntriesByType
    ? performance.getEntriesByType("resource").filter((one) => !one.name.startsWith("data:")).length : 0;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
