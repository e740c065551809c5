"use strict";
// Everything from the data is put on the page by textContent and title: it is text there, never markup.
(() => {
  const short = (x) => Number(x.toPrecision(3)).toString();
  const element = (id) => document.getElementById(id);

  // Tables sort by the column whose head is clicked, numbers as numbers, and back on the next click.
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      head.title = "sort";
      head.addEventListener("click", () => {
        const body = table.tBodies[0];
        const falling = head.dataset.order === "rising";
        const value = (row) => row.cells[column].textContent.trim();
        const compare = (a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x !== "" && y !== "" && !isNaN(x) && !isNaN(y)) return x - y;
          return x.localeCompare(y, "en", { numeric: true });
        };
        const rows = [...body.rows].sort((a, b) => (falling ? compare(b, a) : compare(a, b)));
        heads.forEach((other) => delete other.dataset.order);
        head.dataset.order = falling ? "falling" : "rising";
        body.append(...rows);
      });
    });
  }

  if (!element("data")) return;
  const data = JSON.parse(element("data").textContent);
  const choice = element("criterion");
  const count = element("count");
  for (const name of Object.keys(data.criteria)) choice.append(new Option(name, name));

  const cells = Array.from({ length: data.layers }, (_, layer) => {
    const cell = document.createElement("span");
    cell.textContent = layer;
    element("strip").append(cell);
    return cell;
  });

  function answers(chosen, removed) {
    const found = [];
    const gone = removed.length;
    found.push(["layers", `${removed.join(", ")} of 0 to ${data.layers - 1}`]);
    if (data.layer !== null) {
      const kept = data.parameters - gone * data.layer;
      found.push(["parameters left", `${kept.toLocaleString("en")}, ${short((100 * kept) / data.parameters)} %`]);
    }
    const often = chosen.picked[gone];
    if (often) {
      const least = removed.reduce((a, b) => (often[b] < often[a] ? b : a));
      const others = often.map((share, layer) => [share, layer]).filter(([, layer]) => !removed.includes(layer));
      const [share, other] = others.reduce((a, b) => (b[0] > a[0] ? b : a), [0, -1]);
      const next = share > 0 ? `; of those that stay layer ${other} in ${short(100 * share)} %` : "";
      found.push(["how stable", `layer ${least} is picked in ${short(100 * often[least])} % of the draws${next}`]);
    }
    if (data.divergence && removed.every((layer) => data.divergence[layer] !== null)) {
      const sum = removed.reduce((total, layer) => total + data.divergence[layer], 0);
      found.push(["predicted divergence", `${short(sum)} nats a token, the sum of single layers; no bound`]);
    }
    const same = data.known.filter((row) => row.layers.join() === removed.join());
    for (const row of same) found.push(["perplexity", `${short(row.times)} × dense, ${row.text}`]);
    if (!same.length) found.push(["perplexity", "not measured in this run; the command below, then eval, measures it"]);
    return found;
  }

  function show() {
    const chosen = data.criteria[choice.value];
    const removed = chosen.sets[count.value];
    element("number").textContent = count.value;
    cells.forEach((cell, layer) => {
      const often = chosen.picked[count.value];
      const words = [`layer ${layer}`];
      if (chosen.scores && chosen.scores[layer] !== null) words.push(`score ${short(chosen.scores[layer])}`);
      if (often) words.push(`picked in ${short(100 * often[layer])} % of the draws`);
      if (data.divergence && data.divergence[layer] !== null) words.push(`alone ${short(data.divergence[layer])} nats`);
      cell.title = words.join(", ");
      cell.className = removed.includes(layer) ? "gone" : "";
    });
    element("strip").setAttribute("aria-label", `layers ${removed.join(", ")} would go`);
    element("answers").replaceChildren(
      ...answers(chosen, removed).flatMap(([term, words]) => {
        const [name, value] = [document.createElement("dt"), document.createElement("dd")];
        name.textContent = term;
        value.textContent = words;
        return [name, value];
      }),
    );
    // A name that begins with a dash is no option behind `--`.
    const same = data.known.filter((row) => row.layers.join() === removed.join());
    const mend = same.some((row) => row.mended) ? " --mend" : "";
    const layers = removed.join(",");
    element("command").textContent = `lyapunov-prune prune --layers ${layers}${mend} -o pruned -- ${data.command}`;
  }

  function choose() {
    const known = Object.keys(data.criteria[choice.value].sets).map(Number);
    const nearest = known.reduce((a, b) => (Math.abs(b - count.value) < Math.abs(a - count.value) ? b : a));
    [count.min, count.max] = [Math.min(...known), Math.max(...known)];
    count.value = nearest;
    count.hidden = known.length === 1; // a slider of one position
    show();
  }

  choice.addEventListener("change", choose);
  count.addEventListener("input", choose);
  element("copy").addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(element("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy"); // a page from a file has no clipboard of its own
  });
  if (data.start) {
    choice.value = data.start.criterion;
    count.max = data.layers;
    count.value = data.start.count;
  }
  choose();
})();
