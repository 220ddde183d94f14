// The settings: the fields of a request that the user chooses, and errors that name the setting at fault.
import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed"]; // fields of a request
const NEUTRAL = { top_k: 0, min_p: 0, repetition_penalty: 1 }; // values that change nothing

export class Settings {
  // `panel` has the form; `others` are controls elsewhere on the page that are kept too, by name.
  constructor(panel, others) {
    this.panel = panel;
    this.form = panel.querySelector("form");
    const named = [...this.form.elements].map((control) => [control.name, control]);
    this.controls = { ...Object.fromEntries(named), ...others };
    this.kept = loadSettings();
    for (const [name, control] of Object.entries(this.controls)) control.value = this.kept[name] ?? "";
    for (const control of Object.values(this.controls)) control.addEventListener("change", () => this.keep());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", ({ target }) => target.removeAttribute("aria-invalid"));
  }

  get key() {
    return this.controls.api_key.value;
  }

  // Stores the settings, and `more` that the page is to find again in `kept`.
  keep(more = {}) {
    const values = Object.entries(this.controls).map(([name, { value }]) => [name, value]);
    this.kept = { ...this.kept, ...Object.fromEntries(values), ...more };
    saveSettings(this.kept);
  }

  // Shows what applies where nothing is set, from a model's card. `more`: the element for what has no setting.
  showDefaults(card, more) {
    const { temperature, top_p: topP, ...others } = card?.default_sampling_params ?? {};
    const size = card?.max_model_len;
    const byDefault = (value) => (value === undefined ? "" : `${value} by default`);
    this.controls.temperature.placeholder = byDefault(temperature);
    this.controls.top_p.placeholder = byDefault(topP);
    this.controls.max_completion_tokens.placeholder = size ? `up to ${size.toLocaleString("en")}` : "";
    const active = Object.entries(others).filter(([name, value]) => value !== NEUTRAL[name]);
    const shown = active.map(([name, value]) => `${name} ${value}`).join(", ");
    more.textContent = shown && `The model's defaults apply too: ${shown}.`;
  }

  // What is wrong with a setting, or an empty text.
  fault() {
    const invalid = this.form.querySelector(":invalid");
    if (invalid) return this.blame(invalid, invalid.validationMessage);
    const { tools } = this.controls;
    try {
      if (!tools.value.trim() || Array.isArray(JSON.parse(tools.value))) return "";
      return this.blame(tools, "This must be a JSON list.");
    } catch (error) {
      return this.blame(tools, error.message);
    }
  }

  // An error's sentence for the user, with the setting or the field at fault.
  describe({ message, param }) {
    const control = this.form.elements[param?.split(/[.[]/)[0]];
    if (control) return this.blame(control, message);
    return param && !message.includes(param) ? `${message} (field: ${param})` : message;
  }

  blame(control, message) {
    this.panel.open = true;
    control.setAttribute("aria-invalid", "true");
    return `Settings, ${control.labels[0].firstChild.textContent.trim()}: ${message}`;
  }

  // The fields of a request, and its messages with the system message.
  fields(messages) {
    const { system, tools, stop } = this.controls;
    const body = { messages };
    if (system.value.trim()) body.messages = [{ role: "system", content: system.value.trim() }, ...messages];
    if (tools.value.trim()) body.tools = JSON.parse(tools.value);
    for (const name of NUMBERS) if (this.controls[name].value) body[name] = Number(this.controls[name].value);
    if (stop.value) body.stop = stop.value.split("\n").filter(Boolean);
    return body;
  }
}
