"""The chat's Markdown on Node, with a document that only knows the few things that a safe page needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dashboard.test_page_model import run_on_node

RENDER = """
const fs = await import("node:fs");
class Node {
  constructor(tagName) { Object.assign(this, { tagName: tagName.toUpperCase(), attributes: {}, childNodes: [] }); }
  append(...nodes) { this.childNodes.push(...nodes.map((node) => (typeof node === "string" ? { text: node } : node))); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
}
globalThis.document = { createElement: (tag) => new Node(tag), createTextNode: (text) => ({ text }) };
const SAFE = new Set("href target rel title type class data-copy aria-label tabindex start".split(" "));
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const markup = (node) => {
  if (node.text !== undefined) return escaped(node.text);
  const bad = Object.keys(node.attributes).filter((name) => !SAFE.has(name));
  if (bad.length) throw new Error(`unexpected attributes ${bad}`);
  const tag = node.tagName.toLowerCase();
  const href = node.attributes.href ? ` ${node.attributes.href}` : "";
  return `<${tag}${href}>${node.childNodes.map(markup).join("")}</${tag}>`;
};
const found = JSON.parse(fs.readFileSync(0, "utf8")).map((text) => {
  const host = new Node("div");
  showMarkdown(host, text);
  return host.childNodes.map(markup).join("");
});
console.log(JSON.stringify(found));
"""
LINK = "https://example.org/"
SHOWN = {
    "**a** *b* ***c*** ~~d~~ `e*f*`": "<p><strong>a</strong> <em>b</em> <strong><em>c</em></strong> <s>d</s> "
    "<code>e*f*</code></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "## A title\ntext\nmore": "<h5>A title</h5><p>text<br></br>more</p>",
    "1. a\n   - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "---": "<hr></hr>",
    "| a | b |\n|--|:-:|\n| 1 | `2` |": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>",
    "```py\n<b>\n```": "<div><div><span>py</span><button>Copy</button></div><pre><code>&lt;b></code></pre></div>",
    "```\nnot ended": "<div><div><span></span><button>Copy</button></div><pre><code>not ended</code></pre></div>",
    f"[a *b*]({LINK} 'title')": f"<p><a {LINK}>a <em>b</em></a></p>",
    f"see {LINK}x_(y).": f"<p>see <a {LINK}x_(y)>{LINK}x_(y)</a>.</p>",
    f"![a]({LINK}a.png)": f"<p><a {LINK}a.png>image: a</a></p>",
    "&lt;b&gt; &#60;i> &unknown;": "<p>&lt;b> &lt;i> &amp;unknown;</p>",
    r"\*a\*": "<p>*a*</p>",
    "a<br>b": "<p>a<br></br>b</p>",
}
ATTACKS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](vbscript:x) [b](file:///etc/passwd) [c](//example.org) [d](/local)",
    "<javascript:alert(1)>",
    "![a](javascript:alert(1))",
    '[a](https://example.org/"onmouseover="alert(1))',
    "`<script>`\n```\n</code></pre><script>alert(1)</script>\n```",
    "| <script> |\n|--|\n| <iframe src=x> |",
)
LONG = 50_000
REPEATED = ("[", "![", "*a ", "**a ", "_a_", "`a", "``` ", "> ", "- ", "  - a\n", "| a", "|-|\n", "<", "&#", "http://")
ODD = (" " * LONG + "a", "`" + " " * LONG + "x`", "[" * LONG + "](", "> " * 200 + "a\n" * 2000, "[a](" * (LONG // 4))
HEAVY = (*(mark * (LONG // len(mark)) for mark in REPEATED), *ODD)


def render(texts: list[str], folder: Path) -> list[Any]:
    found: list[Any] = run_on_node(RENDER, texts, folder, "markdown")
    return found


def test_markdown_becomes_elements(tmp_path: Path) -> None:
    assert dict(zip(SHOWN, render(list(SHOWN), tmp_path), strict=True)) == SHOWN


def test_no_text_becomes_a_script_or_a_link_that_runs_one(tmp_path: Path) -> None:
    for text, shown in zip(ATTACKS, render(list(ATTACKS), tmp_path), strict=True):
        assert not any(
            tag in shown for tag in ("<script", "<img", "<iframe", "<a java", "<a data", "<a vb", "<a file")
        ), text
        assert "<a " not in shown or "<a https://example.org/%22onmouseover" in shown, text


def test_text_that_is_hard_to_parse_holds_up_no_page(tmp_path: Path) -> None:
    """All of it is rendered within the time limit of the process."""
    assert all(render(list(HEAVY), tmp_path))
