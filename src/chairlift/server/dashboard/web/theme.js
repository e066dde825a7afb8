// Light or dark theme: from the system or the switch. Colours are in the style sheet; canvases read them here.

import { byId } from "./format.js";

const THEME_KEY = "chairlift-theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
let colours = {};

const COLOUR_NAMES = ["bg", "card", "line", "text", "muted", "faint", "prefill", "decode", "cached", "preempt", "draft",
  "swap", "bubble", "stay", "accent", "own"];
// Okabe and Ito's colours, which are safe for colour blindness; owners also differ by a mark.
const OWNER_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C7AE6", "#B8A800"];

export function palette() {
  return colours;
}

export function ownerColour(handle) {
  return OWNER_COLOURS[handle % OWNER_COLOURS.length];
}

// One of four marks distinguishes requests of the same colour.
export function ownerMark(handle) {
  return Math.floor(handle / OWNER_COLOURS.length) % 4;
}

export function startTheme(onChange) {
  const button = byId("theme");
  const show = () => {
    const theme = storedTheme() || (darkSystem.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", theme === "dark" ? "Switch to light colours" : "Switch to dark colours");
    button.setAttribute("aria-pressed", String(theme === "dark"));
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(COLOUR_NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    onChange();
  };
  button.addEventListener("click", () => {
    storeTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    show();
  });
  darkSystem.addEventListener("change", show);
  show();
}

// A page opened from a file may have no storage.
function storedTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function storeTheme(theme) {
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // without storage, the choice lasts as long as the page
  }
}
