"use strict";
// Draws the charts from the page's own data, and reads off the curves under the pointer. Text is set as text alone.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const views = (window.finetuneViews = {});
  const hidden = new Set();
  const is_compared = document.querySelector("input[data-run]") !== null;
  const number = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  class Drawn {
    constructor(chart) {
      this.chart = chart;
      this.figure = document.getElementById(`chart-${chart.name}`);
      this.plot = this.figure.querySelector(".plot");
      this.readout = this.figure.querySelector(".readout");
      this.canvas = this.plot.appendChild(element("div"));
      this.cursor = this.plot.appendChild(element("div", "cursor"));
      this.cursor.hidden = true;
      this.series = chart.curves.map((curve) => chart.points.filter((point) => point.curve === curve.index));
      this.steps = [...new Set(chart.points.map((point) => point.step))].sort((a, b) => a - b);
      if (chart.has_steps) this.listen();
      for (const button of this.figure.querySelectorAll("button[data-form]")) {
        button.addEventListener("click", () => this.draw(button.dataset.form));
      }
    }

    listen() {
      this.plot.addEventListener("pointermove", (event) => this.follow(event));
      this.plot.addEventListener("pointerdown", (event) => this.follow(event));
      this.plot.addEventListener("pointerleave", () => showAt(null));
      this.plot.addEventListener("keydown", (event) => this.walk(event));
      this.plot.addEventListener("blur", () => showAt(null));
    }

    async draw(form) {
      const specification = structuredClone(this.chart.specifications[form]);
      specification.data.find((data) => data.name === "points").values = structuredClone(this.chart.points);
      const options = { mode: "vega", renderer: "svg", actions: false, ast: true, tooltip: false, defaultStyle: false, hover: false };
      if (this.view) this.view.finalize();
      this.view = (await window.finetuneVega(this.canvas, specification, options)).view;
      views[this.chart.name] = this.view;
      for (const button of this.figure.querySelectorAll("button[data-form]")) {
        button.setAttribute("aria-pressed", String(button.dataset.form === form));
      }
      await this.hide();
      this.show(null);
    }

    hide() {
      return this.view.signal("hidden", [...hidden]).runAsync();
    }

    left() {
      return this.view.origin()[0] + this.view.padding().left;
    }

    follow(event) {
      const box = this.plot.getBoundingClientRect();
      const step = this.view.scale("x").invert(event.clientX - box.left - this.left());
      this.at = this.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), this.steps[0]);
      showAt(this.at);
    }

    walk(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const index = this.at === undefined ? (move > 0 ? -1 : this.steps.length) : this.steps.indexOf(this.at);
      this.at = this.steps[Math.min(Math.max(index + move, 0), this.steps.length - 1)];
      showAt(this.at);
    }

    // The value of each curve at a step, or its last one before.
    show(step) {
      const is_shown = step !== null && step >= this.steps[0] && step <= this.steps.at(-1);
      this.cursor.hidden = !is_shown;
      const lines = [];
      if (is_shown) {
        this.cursor.style.left = `${this.left() + this.view.scale("x")(step)}px`;
        this.cursor.style.height = `${this.view.height()}px`;
        lines.push(element("span", "", `step ${step.toLocaleString("en")}`));
      }
      this.chart.curves.forEach((curve, index) => {
        if (hidden.has(curve.run) || !this.series[index].length) return;
        if (curve.raw && is_compared) return; // their smoothed selves are enough to read
        const point = is_shown ? this.series[index].findLast((one) => one.step <= step) : null;
        if (is_shown && !point) return;
        if (!is_shown && !this.chart.large) return;
        const line = element("span");
        const sign = line.appendChild(element("i", this.series[index][0].measured ? "measured" : curve.raw ? "raw" : ""));
        sign.style.borderColor = `var(--hue-${curve.hue})`;
        line.append(curve.name);
        if (point) line.append(element("b", "", number(point.value)));
        lines.push(line);
      });
      this.readout.replaceChildren(...lines);
    }
  }

  const drawn = charts.map((chart) => new Drawn(chart));
  let wanted = null;
  let is_due = false;
  function showAt(step) {
    wanted = step;
    if (is_due) return;
    is_due = true;
    requestAnimationFrame(() => {
      is_due = false;
      for (const one of drawn) if (one.view) one.show(wanted);
    });
  }

  for (const box of document.querySelectorAll("input[data-run]")) {
    box.checked = true;
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
      for (const one of drawn) one.hide().then(() => one.show(null));
    });
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  window.finetuneReady = Promise.all(drawn.map((one) => one.draw(one.chart.first)));
})();
