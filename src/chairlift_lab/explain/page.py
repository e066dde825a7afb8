"""Self-contained HTML pages: embedded pictures, light and dark, readable on a phone."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from chairlift_lab.explain.palette import DARK, LIGHT, Theme
from chairlift_lab.explain.topic import Topic
from chairlift_lab.explain.words import to_html

Images = Mapping[str, Mapping[str, bytes]]  # picture -> theme -> PNG


def _variables(theme: Theme) -> str:
    return (
        f"--background:{theme.background};--ink:{theme.ink};--muted:{theme.muted};--faint:{theme.faint};"
        f"--line:{theme.hidden};--link:{'#0072B2' if theme is LIGHT else '#56B4E9'};color-scheme:{theme.name}"
    )


# The reader's choice (data-theme) overrides the system's.
STYLE = f"""
:root{{{_variables(LIGHT)}}}
.dark{{display:none}}
@media (prefers-color-scheme:dark){{
:root:not([data-theme=light]){{{_variables(DARK)}}}
:root:not([data-theme=light]) .dark{{display:block}}
:root:not([data-theme=light]) .light{{display:none}}
}}
:root[data-theme=dark]{{{_variables(DARK)}}}
:root[data-theme=dark] .dark{{display:block}}
:root[data-theme=dark] .light{{display:none}}
body{{margin:0;background:var(--background);color:var(--ink);
font:17px/1.6 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:64rem;margin:0 auto;padding:1.5rem 1.25rem 4rem}}
p,ul,ol,pre,h1,h2,.question{{max-width:44rem}}
h1{{font-size:1.9rem;line-height:1.2;margin:.6rem 0}}
h2{{font-size:1.25rem;margin:2.2rem 0 .4rem}}
a{{color:var(--link)}}
code{{font:0.88em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--faint);border-radius:4px;
padding:.1em .35em}}
pre{{background:var(--faint);border-radius:8px;padding:.8rem 1rem;overflow-x:auto}}
pre code{{background:none;padding:0}}
figure{{margin:1.6rem 0}}
figure img{{width:100%;height:auto;border:1px solid var(--faint);border-radius:8px;box-sizing:border-box}}
figcaption,.question,footer,nav{{color:var(--muted)}}
.question{{font-size:1.1rem}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:.95rem}}
th,td{{text-align:left;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--faint)}}
nav{{display:flex;justify-content:space-between;gap:1rem;align-items:center}}
button{{font:inherit;font-size:.85rem;color:var(--ink);background:var(--faint);border:1px solid var(--line);
border-radius:6px;padding:.3rem .7rem;cursor:pointer}}
.topics{{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:1.2rem;padding:0;max-width:none;
list-style:none}}
.topics a{{display:block;height:100%;border:1px solid var(--line);border-radius:10px;overflow:hidden;
text-decoration:none;color:var(--ink)}}
.topics a:hover,.topics a:focus-visible{{border-color:var(--link)}}
.topics img{{width:100%;height:9rem;object-fit:cover;object-position:left top}}
.topics div{{padding:.7rem 1rem 1rem}}
.topics span{{display:block;color:var(--muted);font-size:.92rem}}
"""

SCRIPT = """
document.querySelector("button").addEventListener("click", () => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
});
"""


def topic_page(
    topic: Topic,
    text: str,
    images: Images,
    alts: Mapping[str, str],
    model: str,
    neighbours: tuple[Topic | None, Topic | None],
) -> str:
    """The page of a topic; `neighbours` are the topics before and after it in the guide."""

    def figure(name: str) -> str:
        caption = f"<figcaption>{escape(alts[name])}</figcaption>"
        return f"<figure>{_both(images[name], alts[name])}{caption}</figure>"

    code = ", ".join(f"<code>{escape(place)}</code>" for place in topic.code)
    body = f"""<p class="question">{escape(topic.question)}</p>
{to_html(text, figure)}
<h2>Draw it yourself</h2>
<pre><code>{escape(topic.command)}</code></pre>
<p>The pictures on this page come from a run of <code>{escape(model)}</code>; all that was recorded of it is in
<a href="{topic.name}.json">{topic.name}.json</a>. The code behind it: {code}.</p>"""
    return _page(topic.title, body, _links(neighbours))


def index_page(topics: Sequence[Topic], thumbnails: Mapping[str, Mapping[str, bytes]], model: str) -> str:
    cards = "".join(
        f'<li><a href="{topic.name}.html">{_both(thumbnails[topic.name], "")}<div><strong>{escape(topic.title)}'
        f"</strong><span>{escape(topic.question)}</span></div></a></li>"
        for topic in topics
    )
    body = f"""<p>How a server for language models works, in pictures. Nothing here is drawn by hand: each picture is
made from what the engine did in a run of <code>{escape(model)}</code>, and can be made again with one command.</p>
<ul class="topics">{cards}</ul>"""
    return _page("Chairlift, the visual guide", body, "")


def _links(neighbours: tuple[Topic | None, Topic | None]) -> str:
    before, after = neighbours
    back = "" if before is None else f'<a href="{before.name}.html">← {escape(before.title)}</a>'
    on = "" if after is None else f'<a href="{after.name}.html">{escape(after.title)} →</a>'
    return f'<span>{back}</span><a href="index.html">All topics</a><span>{on}</span>'


def _both(png: Mapping[str, bytes], alt: str) -> str:
    return "".join(
        f'<img class="{theme}" alt="{escape(alt)}" src="data:image/png;base64,{b64encode(data).decode()}">'
        for theme, data in png.items()
    )


def _page(title: str, body: str, links: str) -> str:
    foot = f"<footer><nav>{links}</nav></footer>" if links else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<nav><span>Chairlift · the visual guide</span><button type="button">Light / dark</button></nav>
<h1>{escape(title)}</h1>
{body}
{foot}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""
