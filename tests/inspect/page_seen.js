// What a reader sees of a page, in a browser or in the stand-in of page_shim.js.
globalThis.seen = () => {
  const at = (id) => document.getElementById(id);
  const walk = (node) => [node, ...Array.from(node.children).flatMap(walk)];
  const texts = (id) => Array.from(at(id).children).map((one) => one.textContent);
  const words = Array.from(at("words").children), drawn = walk(at("picture"));
  return {
    title: at("title").textContent,
    words: texts("words"),
    pressed: words.findIndex((one) => one.getAttribute("aria-pressed") === "true"),
    focused: words.indexOf(document.activeElement),
    tabs: words.filter((one) => one.tabIndex === 0).length,
    named: words.map((one) => one.getAttribute("aria-label")),
    figures: at("figures").textContent,
    explained: at("explained").textContent,
    alts: drawn.filter((one) => one.tagName.toLowerCase() === "img").map((one) => one.getAttribute("alt")),
    groups: Array.from(at("trace").children).map((one) => [one.getAttribute("label"), one.children.length]),
    sources: texts("sources"),
    rects: drawn.filter((one) => one.tagName === "rect").map((one) => one.getAttribute("fill-opacity")),
    label: drawn.map((one) => one.getAttribute("aria-label")).find((one) => one) || null,
    layers: texts("layer"),
    views: texts("view"),
    locked: at("layer").disabled,
    elements: Array.from(new Set(walk(at("words")).concat(drawn, walk(at("sources")))
      .map((one) => one.tagName.toLowerCase()))).sort(),
  };
};
