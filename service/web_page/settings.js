// The configuration in effect, fetched when the reader opens it.

import {count, plural} from "./figures.js";
import {get, TokenRequired} from "./follow.js";
import {h, patch, table} from "./patch.js";

const ORIGINS = {file: "given", auto: "filled in", default: "default"};

const shown = value => (typeof value === "string" ? value : value === null ? "none" : JSON.stringify(value));
const within = (setting, words) => {
  const text = `${setting.key} ${shown(setting.value)} ${setting.verdict} ${setting.note}`.toLowerCase();
  return words.every(word => text.includes(word));
};

export class Settings {
  constructor(onTokenRequired) {
    this.details = document.getElementById("settings");
    this.search = document.getElementById("search");
    this.given = document.getElementById("given");
    this.run = null;
    this.all = null;
    this.onTokenRequired = onTokenRequired;
    this.details.addEventListener("toggle", () => this.load());
    this.search.addEventListener("input", () => this.draw());
    this.given.addEventListener("change", () => this.draw());
  }

  /** Shows the settings of `run`. */
  show(run) {
    if (run.id === this.run) return;
    this.run = run.id;
    this.all = null;
    patch(document.getElementById("found"));
    this.load();
  }

  async load() {
    if (!this.details.open || this.all || this.run === null) return;
    const run = this.run;
    try {
      const answer = await get(`/v1/config?run=${encodeURIComponent(run)}`);
      if (run !== this.run) return;
      this.configuration = answer.runs[0]?.ranks.map(rank => rank.configuration).find(Boolean) || null;
      this.all = this.configuration?.settings || [];
      this.draw();
    } catch (error) {
      if (error instanceof TokenRequired) this.onTokenRequired();
      else
        patch(
          document.getElementById("found"),
          h(
            "p",
            {class: "soft"},
            `The configuration could not be loaded: ${error.message}. Close and reopen this section to try again.`,
          ),
        );
    }
  }

  draw() {
    if (!this.all) return;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = this.all.filter(
      setting => within(setting, words) && !(this.given.checked && setting.origin === "default"),
    );
    patch(
      document.getElementById("matches"),
      this.all.length ? `${count(matches.length)} of ${plural(this.all.length, "setting")}` : "",
    );
    const idle = [
      ["Without effect here", this.configuration?.without_effect],
      ["Deprecated", this.configuration?.deprecated],
    ]
      .filter(([, keys]) => keys?.length)
      .map(([word, keys]) => h("p", {key: word, class: "soft"}, `${word}: ${keys.join(", ")}.`));
    patch(
      document.getElementById("found"),
      this.configuration?.source
        ? h("p", {class: "soft"}, "From ", h("code", {}, this.configuration.source), ".")
        : null,
      idle,
      matches.length
        ? table(
            "Settings",
            "settings",
            ["setting", "value", "origin", "effect"],
            matches.map(setting =>
              h(
                "tr",
                {key: setting.key},
                h("th", {scope: "row"}, h("code", {}, setting.key)),
                h("td", {class: "left"}, h("code", {}, shown(setting.value))),
                h("td", {class: "left"}, ORIGINS[setting.origin] || setting.origin),
                h("td", {class: "left note"}, [setting.verdict, setting.note].filter(Boolean).join(": ")),
              ),
            ),
          )
        : h(
            "p",
            {class: "soft"},
            this.all.length ? "No setting matches." : "This run does not publish its settings.",
          ),
    );
  }
}
