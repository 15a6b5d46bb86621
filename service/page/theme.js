// Before the first paint, so that who chose dark sees no white flash.
"use strict";
const chosen = localStorage.getItem("tierd-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
