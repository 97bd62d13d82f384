"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // A cell of the matrix opens what is behind it, and marks its obligation there.
  const show = (id, obligation) => {
    const drill = document.getElementById(id);
    if (!drill) return;
    drill.open = true;
    all("[data-of]", drill).forEach((one) =>
      one.classList.toggle("chosen", one.dataset.of === obligation)
    );
    // Its column has no names in the cells: there are many, and the page stays small.
    all(".features", drill).forEach((table) => {
      const names = [...table.tHead.rows[0].cells].map((one) => one.dataset.of);
      all("td", table).forEach((one) =>
        one.classList.toggle("chosen", names[one.cellIndex] === obligation)
      );
    });
    drill.querySelector("summary").focus();
    drill.scrollIntoView();
  };
  all(".matrix a[href^='#of-']").forEach((link) =>
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const id = link.getAttribute("href").slice(1);
      history.replaceState(null, "", "#" + id);
      show(id, link.dataset.obligation);
    })
  );
  if (location.hash.startsWith("#of-")) show(location.hash.slice(1));

  // What a feature is stands once, in the coverage.
  const titles = new Map(
    all("#coverage .titles tr").map((row) => [...row.cells].slice(0, 2).map((one) => one.textContent))
  );
  all(".features tbody th").forEach((one) => (one.title = titles.get(one.textContent) ?? ""));

  all("button[data-copy]").forEach((button) =>
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
        button.textContent = "Copied";
      } catch {
        const range = document.createRange();
        range.selectNodeContents(button.previousElementSibling);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        button.textContent = "Selected";
      }
    })
  );

  // A cell of the heat map without a case says why, as the lists above it do.
  const reasons = new Map(
    all("[data-missing]").map((list) => [
      list.dataset.missing,
      new Map(all("li", list).map((one) => [one.firstChild.textContent, one.textContent])),
    ])
  );
  all(".heat").forEach((table) => {
    const names = [...table.tHead.rows[0].cells].map((one) => one.textContent);
    all("tbody tr", table).forEach((row) =>
      [...row.cells].slice(2).forEach((cell) => {
        if (!cell.className)
          cell.title = reasons.get(names[cell.cellIndex])?.get(row.cells[0].textContent) ?? "";
      })
    );
  });

  // Known faults: those that have all words of the search, and what is chosen.
  const filter = document.getElementById("filter");
  if (filter) {
    const faults = all(".fault");
    const choose = () => {
      const words = filter.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = ["severity", "implementation", "obligation"].map((name) => [
        name,
        filter.elements[name].value,
      ]);
      faults.forEach((one) => {
        const fits = ([name, value]) =>
          !value ||
          (name === "severity" ? one.dataset[name] === value : one.dataset[name].split("|").includes(value));
        one.hidden = !words.every((word) => one.textContent.toLowerCase().includes(word)) || !chosen.every(fits);
      });
      document.getElementById("shown").textContent =
        `${faults.filter((one) => !one.hidden).length} of ${faults.length}`;
    };
    filter.addEventListener("input", choose);
    filter.addEventListener("submit", (event) => event.preventDefault());
  }

  // Bands: one picture for each stage and precision, a marker at N, and the bytes there.
  const form = document.getElementById("bands");
  const slider = document.getElementById("ranks");
  const ranks = slider.dataset.ranks.split(",");
  const across = slider.dataset.across.split(",");
  const draw = () => {
    const at = Number(slider.value);
    const stage = form.elements.stage.value;
    const precision = form.elements.precision.value;
    document.getElementById("n").textContent = ranks[at];
    slider.setAttribute("aria-valuetext", ranks[at] + " ranks");
    all(".chart").forEach((chart) => {
      chart.hidden = chart.dataset.stage !== stage || chart.dataset.precision !== precision;
      const marker = chart.querySelector(".marker");
      marker.setAttribute("x1", across[at]);
      marker.setAttribute("x2", across[at]);
      const sum = chart.querySelector(".sum");
      const parts = sum.dataset.steps.split(";")[at].split(",").map(Number);
      const total = parts.reduce((a, b) => a + b, 0);
      const shown = parts.map((one) => one.toFixed(2));
      sum.textContent =
        `On ${ranks[at]} rank${ranks[at] === "1" ? "" : "s"}: ${shown[0]} parameters + ` +
        `${shown[1]} gradients + ${shown[2]} optimizer = ${total.toFixed(2)} bytes per parameter.`;
    });
  };
  form.addEventListener("input", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  draw();

  // On paper nothing can be opened.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    opened.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((one) => (one.open = false)));
})();
