// The little of a browser's document that a page uses, for Node: elements, attributes, events that bubble. No HTML is
// parsed: an element gets its text by textContent alone, and a page that used innerHTML would show nothing.
const fs = require("fs");
const [, , pageFile, ...files] = process.argv;
const page = fs.readFileSync(pageFile, "utf-8");

class Node {
  constructor(tagName) {
    Object.assign(this, { tagName, attributes: {}, children: [], listeners: {}, parent: null, text: "", id: "" });
    Object.assign(this, { tabIndex: -1, disabled: false, value: "", style: { setProperty: () => {} } });
  }
  get textContent() { return this.children.length ? this.children.map((one) => one.textContent).join("") : this.text; }
  set textContent(text) { this.children = []; this.text = String(text); }
  setAttribute(name, value) { this.attributes[name] = value; if (name === "value") this.value = value; }
  getAttribute(name) { return name in this.attributes ? this.attributes[name] : null; }
  append(...nodes) { for (const node of nodes) { node.parent = this; this.children.push(node); } }
  replaceChildren(...nodes) { this.children = []; this.text = ""; this.append(...nodes); }
  addEventListener(kind, heard) { (this.listeners[kind] ||= []).push(heard); }
  dispatchEvent(event) {
    for (let node = this; node; node = event.bubbles ? node.parent : null) {
      for (const heard of node.listeners[event.type] || []) heard(event);
    }
  }
  focus() { document.activeElement = this; this.dispatchEvent({ type: "focus", bubbles: false }); }
}

const byId = {};
for (const [, tag, id] of page.matchAll(/<(\w+)[^>]* id="(\w+)"/g)) byId[id] = Object.assign(new Node(tag), { id });
byId.data.text = page.match(/id="data">([^]*?)<\/script>/)[1];
global.Event = class { constructor(type, options) { Object.assign(this, options, { type }); } preventDefault() {} };
global.document = {
  body: new Node("body"), activeElement: null, getElementById: (id) => byId[id],
  createElement: (tag) => new Node(tag), createElementNS: (_, tag) => new Node(tag),
};
const scripts = [...page.matchAll(/<script>([^]*?)<\/script>/g)].map((one) => one[1]);
if (scripts.length !== 1) throw new Error(`a page has one script of its own, this one ${scripts.length}`);
(0, eval)(scripts[0]);
for (const file of files) (0, eval)(fs.readFileSync(file, "utf-8"));
