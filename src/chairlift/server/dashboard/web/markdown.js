// Markdown as nodes of the page. The text comes from a model, so it is never parsed as HTML: tags stay text, nothing is
// loaded, and links lead to http and https only. The work grows with the text, whatever is in it.

import { element } from "./format.js";

const DEEPEST = 8; // quotes and lists in each other, and styles in each other
const LONGEST_URL = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,7})([-*+]|\d{1,9}[.)])( {1,4}|$)/;
const TABLE_LINE = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const SPECIAL = /[\\`*_~[!<&\n]|https?:\/\//g;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const STYLES = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];

// Show a text in a node. Blocks that were shown before are kept, so that a growing text does not lose its selection.
export function showMarkdown(host, text) {
  const blocks = blocksOf(text.split("\n"));
  const known = host.shownBlocks || [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === known[same]) same++;
  while (host.childNodes.length > same) host.lastChild.remove();
  for (const block of blocks.slice(same)) host.append(nodeOf(block, 0));
  host.shownBlocks = blocks.map((block) => block.source);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const begin = at;
    const block = takeBlock(lines, at);
    at = block.end;
    if (block.kind !== "blank") blocks.push({ ...block, source: lines.slice(begin, at).join("\n") });
  }
  return blocks;
}

function takeBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  if (!line.trim()) return { kind: "blank", end: at + 1 };
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2].replace(/ #+$/, ""), end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return takeQuote(lines, at);
  if (ITEM.test(line)) return takeList(lines, at);
  if (isTable(lines, at)) return takeTable(lines, at);
  let end = at + 1;
  while (end < lines.length && !startsBlock(lines, end)) end++;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function startsBlock(lines, at) {
  const line = lines[at];
  return !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_LINE.test(lines[at + 1]);
}

function takeFence(lines, at, [, mark, language]) {
  let end = at + 1;
  const isEnd = (line) => line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
  while (end < lines.length && !isEnd(lines[end])) end++;
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: Math.min(lines.length, end + 1) };
}

function takeQuote(lines, at) {
  let end = at + 1;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function takeList(lines, at) {
  const isNumbered = (mark) => /\d/.test(mark);
  const first = ITEM.exec(lines[at]);
  const items = [];
  let end = at;
  for (let width = 0; end < lines.length; end++) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const isNew = item && item[1].length < first[1].length + 2;
    if (isNew && (isNumbered(item[2]) !== isNumbered(first[2]) || RULE.test(line))) break;
    if (isNew) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else if (!line.trim()) {
      const next = lines[end + 1] || "";
      if (!/^ {2,}\S/.test(next) && !ITEM.test(next)) break;
      items.at(-1).push("");
    } else if (/^ {2,}/.test(line) || !startsBlock(lines, end)) {
      items.at(-1).push(line.slice(Math.min(width, line.length - line.trimStart().length)));
    } else {
      break;
    }
  }
  return { kind: "list", start: isNumbered(first[2]) ? parseInt(first[2], 10) : null, items, end };
}

function takeTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const rows = [lines[at], ...lines.slice(at + 2, end)];
  return { kind: "table", rows: rows.map(cellsOf), end };
}

function cellsOf(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function nodeOf(block, depth) {
  const within = (lines) => (depth < DEEPEST ? blocksOf(lines).map((each) => nodeOf(each, depth + 1)) : [lines.join("\n")]);
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "heading") return element(`h${Math.min(6, block.level + 3)}`, {}, ...inlineNodes(block.text));
  if (block.kind === "rule") return element("hr");
  if (block.kind === "quote") return element("blockquote", {}, ...within(block.lines));
  if (block.kind === "table") return tableNode(block);
  if (block.kind === "paragraph") return element("p", {}, ...inlineNodes(block.text));
  const items = block.items.map((lines) => element("li", {}, ...tight(within(lines))));
  return block.start === null ? element("ul", {}, ...items) : element("ol", { start: block.start }, ...items);
}

// An item's only paragraph is its text.
function tight(nodes) {
  return nodes.length && nodes[0].tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function codeNode({ language, text }) {
  const copy = element("button", { type: "button", class: "small", "data-copy": text, "aria-label": "Copy the code" }, "Copy");
  const head = element("div", { class: "code-head" }, element("span", {}, language), copy);
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, text)));
}

function tableNode({ rows: [head, ...rows] }) {
  const row = (tag, cells) => element("tr", {}, ...head.map((_, index) => element(tag, {}, ...inlineNodes(cells[index] || ""))));
  const table = element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return element("div", { class: "table", tabindex: "0" }, table);
}

// ---- text -----------------------------------------------------------------------------------------------------------

function inlineNodes(text, depth = 0, inLink = false) {
  return new Inline(text, depth, inLink).parse();
}

class Inline {
  constructor(text, depth, inLink) {
    Object.assign(this, { text, depth, inLink, at: 0, nodes: [], plain: "", places: new Map() });
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const special = SPECIAL.exec(text);
      const next = special ? special.index : text.length;
      this.plain += text.slice(this.at, next);
      this.at = next;
      if (special && !this.take(special[0])) this.plain += text[this.at++];
    }
    this.flush();
    return this.nodes;
  }

  flush() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  put(node, end) {
    this.flush();
    this.nodes.push(node);
    this.at = end;
    return true;
  }

  take(mark) {
    if (mark === "\\") return this.takeEscape();
    if (mark === "`") return this.takeCode();
    if (mark === "\n") return this.takeBreak();
    if (mark === "&") return this.takeEntity();
    if (mark === "<") return !this.inLink && this.takeTag();
    if (mark === "[" || mark === "!") return !this.inLink && this.takeLink(mark === "!");
    if (mark.startsWith("http")) return !this.inLink && this.takeAddress();
    return this.depth < DEEPEST && STYLES.some(([opening, tag]) => this.text.startsWith(opening, this.at) && this.takeStyled(opening, tag));
  }

  // The next place of a mark that `fits`, or -1. No part of the text is searched twice, since `from` only grows.
  find(mark, from, fits = () => true) {
    let at = this.places.get(mark) ?? from;
    if (at === -1 || (this.places.has(mark) && at >= from)) return at;
    for (at = this.text.indexOf(mark, from); at >= 0 && !fits(at); ) at = this.text.indexOf(mark, at + 1);
    this.places.set(mark, at);
    return at;
  }

  takeEscape() {
    const next = this.text[this.at + 1];
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  takeBreak() {
    this.plain = this.plain.trimEnd();
    return this.put(element("br"), this.at + 1);
  }

  takeCode() {
    const { text, at } = this;
    let begin = at;
    while (text[begin] === "`") begin++;
    const mark = text.slice(at, begin);
    const end = this.find(mark, begin, (found) => text[found - 1] !== "`" && text[found + mark.length] !== "`");
    if (end < 0) {
      this.plain += mark;
      this.at = begin;
      return true;
    }
    const code = text.slice(begin, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    return this.put(element("code", {}, isPadded ? code.slice(1, -1) : code), end + mark.length);
  }

  takeEntity() {
    ENTITY.lastIndex = this.at;
    const found = ENTITY.exec(this.text);
    if (!found) return false;
    const code = found[1] ? parseInt(found[1], 10) : parseInt(found[2], 16);
    this.plain += found[3] ? ENTITIES[found[3]] : code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
    this.at += found[0].length;
    return true;
  }

  takeTag() {
    const tag = /^<(?:br ?\/?|(https?:\/\/[^\s<>]+))>/i.exec(this.text.slice(this.at, this.at + LONGEST_URL));
    if (!tag) return false;
    const node = tag[1] ? linkNode(tag[1], [tag[1]]) : element("br");
    return node !== null && this.put(node, this.at + tag[0].length);
  }

  takeAddress() {
    let [found] = /^https?:\/\/[^\s<>"`]*/.exec(this.text.slice(this.at, this.at + LONGEST_URL));
    found = found.replace(found.includes("(") ? /[.,;:!?*_~'|]+$/ : /[.,;:!?*_~'|)]+$/, ""); // the sentence's own marks
    const node = found ? linkNode(found, [found]) : null;
    return node !== null && this.put(node, this.at + found.length);
  }

  takeLink(isImage) {
    const { text } = this;
    const begin = this.at + (isImage ? 2 : 1);
    if (isImage && text[this.at + 1] !== "[") return false;
    const middle = this.find("](", begin);
    const end = middle < 0 || middle - begin > LONGEST_URL ? -1 : closingBracket(text, middle + 2);
    if (end < 0) return false;
    const address = text.slice(middle + 2, end).trim().replace(/^<(.*)>$/, "$1").replace(/\s+(?:"[^"]*"|'[^']*')$/, "");
    const label = text.slice(begin, middle);
    const node = linkNode(address, isImage ? [`image: ${label || address}`] : inlineNodes(label, this.depth, true));
    return node !== null && this.put(node, end + 1);
  }

  takeStyled(mark, tag) {
    const { text } = this;
    const begin = this.at + mark.length;
    const isWord = (at) => /[\p{L}\p{N}]/u.test(text[at] || "");
    if (!(text[begin] || " ").trim() || (mark[0] === "_" && isWord(this.at - 1))) return false;
    const isInRun = (at) => text[at + mark.length] === mark[0] || (mark.length === 1 && text[at - 1] === mark);
    const fits = (at) => text[at - 1].trim() && text[at - 1] !== "\\" && !isInRun(at) && !(mark[0] === "_" && isWord(at + mark.length));
    const end = this.find(mark, begin + 1, fits);
    return end >= 0 && this.put(element(tag, {}, ...inlineNodes(text.slice(begin, end), this.depth + 1, this.inLink)), end + mark.length);
  }
}

// The bracket that ends an address, which may have brackets of its own.
function closingBracket(text, from) {
  const most = Math.min(text.length, from + LONGEST_URL);
  for (let at = from, open = 0; at < most && text[at] !== "\n"; at++) {
    if (text[at] === "(") open++;
    else if (text[at] === ")" && open-- === 0) return at;
  }
  return -1;
}

// A link, or null if the address is none of the web: its source stays text.
function linkNode(address, label) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...label);
}
