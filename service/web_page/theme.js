// Light or dark theme. Not a module: it runs before the first paint, so a dark theme shows no white flash.
"use strict";
{
  const KEY = "tierd-theme";
  const NAMES = {system: "Auto", light: "Light", dark: "Dark"};
  const THEMES = Object.keys(NAMES);
  const root = document.documentElement;

  const now = () => root.dataset.theme || "system";
  const next = () => THEMES[(THEMES.indexOf(now()) + 1) % THEMES.length];

  function choose(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  }

  function tell(button) {
    button.dataset.now = now();
    button.textContent = NAMES[now()];
    button.setAttribute("aria-label", `Theme: ${NAMES[now()]}. Change to ${NAMES[next()].toLowerCase()}`);
    document.dispatchEvent(new Event("themed"));
  }

  try {
    choose(localStorage.getItem(KEY));
  } catch {
    // The browser blocks site data: the choice lasts until the web page is closed.
  }
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.addEventListener("click", () => {
      choose(next());
      tell(button);
      try {
        localStorage.setItem(KEY, now());
      } catch {
        // The browser blocks site data.
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => tell(button));
    tell(button);
  });
}
