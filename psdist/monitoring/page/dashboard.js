// The page of a run: follows the events of the dashboard and shows its state, or shows the saved run that it contains.
// Names of peers are only ever set as text.
"use strict";

(() => {
  const POINTS = 300;
  const LATE_SECONDS = 4;
  const PANELS_MS = 4;  // Of a frame, which has 16, also for layout and painting.
  const ROWS_AT_ONCE = 10;
  const SCROLL_MS = 150;  // So long after its last movement a page is being scrolled.
  const SCROLLED_SHOW_MS = 1000;  // News is shown so often meanwhile.
  const LONG_NAME = 20;  // A name with more characters may wrap.
  const PHASES = ["compute", "push", "wait", "pull"];
  const $ = (id) => document.getElementById(id);
  const saved = $("saved") && JSON.parse($("saved").textContent);

  let state = null;
  let serverTime = 0;
  let heardAt = performance.now();
  let stream = null;
  let refusal = "";  // Why this page does not follow the run; empty if it does.
  let scheduled = false;
  let outdated = false;  // News came while the panels were being shown.
  let pending = [];  // Panels that are still to be shown, or the rest of one.
  let shownAt = -Infinity;
  let scrolledAt = -Infinity;
  const curves = { recent: [], whole: [], stride: 1, skipped: 0 };

  // --- state ---

  // Objects have no prototype: a peer may be named like a member of one.
  function plain(value) {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return merge(Object.create(null), value);
  }

  // Apply a JSON merge patch (RFC 7396).
  function merge(target, patch) {
    for (const name of Object.keys(patch)) {
      const value = patch[name];
      if (value === null) delete target[name];
      else if (typeof value === "object" && !Array.isArray(value)) {
        const old = target[name];
        target[name] = merge(old && typeof old === "object" && !Array.isArray(old) ? old : Object.create(null), value);
      } else target[name] = value;
    }
    return target;
  }

  function addPoint(point) {
    curves.recent.push(point);
    if (curves.recent.length > POINTS) curves.recent.shift();
    curves.skipped += 1;
    if (curves.skipped >= curves.stride) {
      curves.whole.push(point);
      curves.skipped = 0;
    }
    if (curves.whole.length > 2 * POINTS) {
      curves.whole = curves.whole.filter((_, at) => at % 2 === 1);
      curves.stride *= 2;
    }
  }

  function receive(message) {
    serverTime = message.time;
    heardAt = performance.now();
    if (message.state) {
      state = plain(message.state);
      curves.recent = message.recent;
      curves.whole = message.whole.length ? message.whole : message.recent.slice();
      const [first, last, count] = [curves.whole[0], curves.whole.at(-1), curves.whole.length];
      curves.stride = count > 1 ? Math.max(1, Math.round((last.time - first.time) / (count - 1))) : 1;
      $("main").hidden = false;
    } else if (state) {
      merge(state, message.change);
      for (const point of message.points || []) addPoint(point);
    }
    schedule();
  }

  // --- text ---

  // Made once: toLocaleString and localeCompare make theirs for each value.
  const NUMBERS = new Intl.NumberFormat("en");
  const TIMES = new Intl.DateTimeFormat([], { hour12: false, timeStyle: "medium", dateStyle: saved ? "short" : undefined });
  const NAMES = new Intl.Collator("en", { numeric: true });

  function number(value, digits = 3) {
    if (value === undefined || value === null) return "";
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
    return NUMBERS.format(Number(value.toPrecision(digits)));
  }

  function bytes(value) {
    if (value === undefined || value === null) return "";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
    return `${number(value)} ${units[at]}`;
  }

  function duration(seconds) {
    if (seconds < 100) return `${number(Math.max(0, seconds), 2)} s`;
    if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
    return seconds < 172800 ? `${number(seconds / 3600, 2)} h` : `${Math.round(seconds / 86400)} days`;
  }

  const clock = (time) => TIMES.format(new Date(1000 * time));
  const plural = (count, noun) => `${NUMBERS.format(count)} ${noun}${count === 1 ? "" : "s"}`;

  // --- elements ---

  function set(element, text) {
    const shown = String(text ?? "");
    if (element.textContent !== shown) element.textContent = shown;
  }

  function make(name, className = "", text = "") {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== "") element.textContent = text;
    return element;
  }

  // Keep one row for each key, in this order. columns: class of each cell. fill: changes a row's cells. Yields between
  // some rows. A value that is an array is never changed, so its row is filled once.
  function* rows(body, entries, columns, fill) {
    const known = (body.known ||= new Map());
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, row] of known) if (!keys.has(key)) { row.remove(); known.delete(key); }
    let before = null;
    let count = 0;
    for (const [key, value] of entries) {
      if (count++ % ROWS_AT_ONCE === ROWS_AT_ONCE - 1) yield;
      let row = known.get(key);
      if (!row) {
        row = make("tr");
        row.setAttribute("role", "row");
        columns.forEach((className, at) => {
          const cell = row.appendChild(make(at ? "td" : "th", className));
          if (!at) cell.scope = "row";
          cell.setAttribute("role", at ? "cell" : "rowheader");  // On small screens rows are grids.
        });
        known.set(key, row);
      }
      const next = before ? before.nextSibling : body.firstChild;
      if (next !== row) body.insertBefore(row, next);
      if (!Array.isArray(value) || row.filled !== value) fill(row.cells, value, key, row);
      row.filled = value;
      before = row;
    }
  }

  function list(element, texts, none) {
    element.classList.toggle("none", !texts.length);
    const shown = texts.length ? texts : [none];
    while (element.children.length > shown.length) element.lastChild.remove();
    shown.forEach((text, at) => set(element.children[at] || element.appendChild(make("li")), text));
  }

  // --- panels ---

  const byName = ([a], [b]) => NAMES.compare(a, b);
  const byRank = (a, b) => (a[1].rank ?? 0) - (b[1].rank ?? 0) || byName(a, b);

  function* showHeader() {
    const run = state.run;
    set($("run-id"), run.id);
    const alive = (members) => Object.values(members).filter((one) => one.state === "live").length;
    const sets = Object.entries(state.parameters).map(([name, one]) =>
      [name + (one.version_max == null || run.phase.includes(`'${name}' at version`) ? ""  // The phase says it.
        : ` at version ${number(one.version_max, 9)}`),
      ...(saved ? [] : [`${number(one.rate)} steps/s`])].join(", "));
    const workers = alive(state.workers);
    const servers = alive(state.servers);
    set($("summary"), [
      run.phase,
      ...(saved ? [] : [`${workers} of ${plural(Math.max(workers, run.workers_min), "worker")}`,
        `${servers} of ${plural(Math.max(servers, run.servers_min), "server")}`]),
      ...sets,
      ...Object.entries(state.datasets).map(([name, one]) =>
        `${name}: epoch ${one.data_epoch}, ${one.done_ranges} of ${plural(one.ranges, "range")} read`),
    ].join(" · "));
    document.title = `${state.problems.length ? `(${state.problems.length}) ` : ""}${run.id} – psdist`;
  }

  let announced = new Set();
  function* showProblems() {
    list($("problems"), state.problems.map((one) => one.text), "none");
    $("problems-panel").classList.toggle("bad", state.problems.length > 0);
    const current = new Map(state.problems.map((one) => [`${one.who} ${one.kind}`, one.text]));
    const fresh = [...current].filter(([key]) => !announced.has(key)).map(([, text]) => text);
    if (fresh.length) set($("live"), fresh.slice(0, 3).join(". "));
    announced = new Set(current.keys());
  }

  function* showWaits() {
    const members = { ...state.workers, ...state.servers };
    const own = Object.keys(members).sort().flatMap((id) => (members[id].waits || []).map((text) => `${id}: ${text}`));
    list($("waits"), [...state.waits, ...own].slice(0, 40), "nothing");
  }

  function remarks(one, id) {
    const texts = state.problems.filter((each) => each.who === id).map((each) => each.text);
    if (!texts.length && one.reason) texts.push(one.reason);
    if (one.note) texts.push(one.note);
    if (one.incarnation > 1) texts.push(`joined ${one.incarnation} times`);
    if (one.staleness > 0) texts.push(`${plural(one.staleness, "version")} stale`);
    return texts.join("; ");
  }

  // The name of a member, which opens its log if the scheduler knows the file.
  function showName(cell, id) {
    cell.classList.toggle("long", id.length > LONG_NAME);
    if (saved || !state.run.logs) { set(cell, id); return; }
    if (!cell.button) {
      cell.button = cell.appendChild(make("button", "name", id));
      cell.button.type = "button";
      cell.button.title = `The last log lines of ${id}`;
      cell.button.addEventListener("click", () => showLog(id));
    }
  }

  async function showLog(id) {
    set($("log-title"), `Log of ${id}`);
    set($("log-lines"), "...");
    $("log").dataset.member = id;
    if (!$("log").open) $("log").showModal();
    let text = "";
    try {
      const answer = await fetch(`logs/${encodeURIComponent(id)}`);
      text = await answer.text();
    } catch (error) {
      text = "the scheduler does not answer";
    }
    if ($("log").dataset.member !== id) return;  // Another one was opened meanwhile.
    set($("log-lines"), text || "(empty)");
    $("log-lines").scrollTop = $("log-lines").scrollHeight;
  }

  function showState(cell, one) {
    const late = one.age !== undefined ? `, silent for ${one.age} s` : "";
    set(cell, `${one.draining ? "draining" : one.state}${late}`);
  }

  function showBar(cell, phases) {
    if (!cell.bar) {
      cell.bar = cell.appendChild(make("div", "bar"));
      cell.bar.setAttribute("role", "img");
      PHASES.forEach((name) => cell.bar.appendChild(make("span", name)));
    }
    cell.bar.hidden = !phases;
    if (!phases) return;
    const label = PHASES.map((name, at) => `${name} ${phases[at]} %`).join(", ");
    if (cell.bar.label === label) return;
    cell.bar.label = label;
    cell.bar.setAttribute("aria-label", label);
    cell.bar.title = label;
    PHASES.forEach((name, at) => {
      const part = cell.bar.children[at];
      part.style.flex = `${phases[at]} 0 0`;
      part.classList.toggle("zero", !phases[at]);
      set(part, phases[at] >= 3 * name.length + 9 ? `${name} ${phases[at]}%` : "");
    });
  }

  function count(all, role) {
    if (saved) return plural(all.length, role);
    return `${plural(all.filter(([, one]) => one.state === "live").length, `live ${role}`)} of ${all.length}`;
  }

  function links(one) {
    return Object.entries(one.links || {}).map(([name, count]) => `${count} ${name.split("|")[0]}`).join(", ");
  }

  function* showWorkers() {
    const bad = new Set(state.problems.map((one) => one.who));
    const all = Object.entries(state.workers).sort(byRank);
    const shown = $("only-problems").checked ? all.filter(([id]) => bad.has(id)) : all;
    set($("workers-count"), count(all, "worker"));
    yield* rows($("workers"), shown, ["", "", "bars", "number", "number opt", "number opt", "opt", "remarks"], (cells, one, id, row) => {
      row.classList.toggle("bad", bad.has(id));
      showName(cells[0], id);
      showState(cells[1], one);
      showBar(cells[2], saved || one.state === "live" ? one.phases : undefined);
      set(cells[3], number(one.rate));
      set(cells[4], bytes(one.sent));
      set(cells[5], bytes(one.received));
      set(cells[6], links(one));
      set(cells[7], remarks(one, id));
    });
  }

  function* showServers() {
    const bad = new Set(state.problems.map((one) => one.who));
    const all = Object.entries(state.servers).sort(byName);
    set($("servers-count"), count(all, "server"));
    const columns = ["", "", "number", "number opt", "number", "number opt", "number opt", "number opt", "number", "remarks"];
    yield* rows($("servers"), all, columns, (cells, one, id, row) => {
      row.classList.toggle("bad", bad.has(id));
      showName(cells[0], id);
      showState(cells[1], one);
      set(cells[2], one.shards);
      set(cells[3], one.copies);
      set(cells[4], number(one.slices));
      set(cells[5], one.apply === undefined ? "" : `${one.apply} %`);
      set(cells[6], bytes(one.waiting_bytes));
      set(cells[7], bytes(one.resident));
      set(cells[8], one.lag === undefined ? "" : number(one.lag));
      set(cells[9], remarks(one, id));
    });
  }

  function copies(shard) {
    const known = new Set((shard.copies || []).map((one) => one[0]));
    const texts = (shard.copies || []).map(([server, status, lag, filled, slices, carrier]) => {
      const progress = status === "filling" ? ` ${filled} of ${slices} slices` : "";
      return `${server} (${status}${progress}, ${lag ? `${plural(lag, "update")} behind` : "up to date"}, ${carrier})`;
    });
    for (const server of [...(shard.backups || []), ...(shard.filling || [])]) if (!known.has(server)) texts.push(server);
    return texts.join("; ") || "none";
  }

  function* showShards() {
    const place = $("shards");
    const known = (place.known ||= new Map());
    for (const [name, part] of known) if (!state.parameters[name]) { part.box.remove(); known.delete(name); }
    for (const [name, one] of Object.entries(state.parameters)) {
      if (!known.has(name)) known.set(name, makeMap(place));
      const part = known.get(name);
      set(part.title, name);
      part.region.setAttribute("aria-label", `shards of ${name}`);
      const shards = Object.entries(one.shards);
      set(part.text, `${one.state}: ${plural(one.tensors, "tensor")}, ${plural(one.elements, "element")}, `
        + plural(one.slices, "slice") + (shards.length ? ` in ${plural(shards.length, "shard")}` : "")
        + `; ${one.consistency}, ${one.optimizer}`);
      part.region.hidden = Boolean(saved);
      yield* rows(part.body, shards, ["", "", "", "number opt"], (cells, shard, index, row) => {
        row.classList.toggle("bad", Boolean(shard.lost));
        set(cells[0], index);
        set(cells[1], shard.lost ? "lost" : shard.primary);
        set(cells[2], copies(shard));
        set(cells[3], shard.term);
      });
    }
  }

  function makeMap(place) {
    const box = place.appendChild(make("div"));
    const title = box.appendChild(make("h3"));
    const text = box.appendChild(make("p", "soft"));
    const region = box.appendChild(make("div", "scroll"));
    region.tabIndex = 0;
    region.setAttribute("role", "region");
    const table = region.appendChild(make("table"));
    const head = table.appendChild(make("thead")).appendChild(make("tr"));
    for (const [label, name] of [["Shard", ""], ["Primary", ""], ["Copies", ""], ["Term", "number opt"]]) {
      head.appendChild(make("th", name, label)).scope = "col";
    }
    return { box, title, text, region, body: table.appendChild(make("tbody")) };
  }

  function* showTraffic() {
    yield* rows($("traffic"), Object.entries(state.traffic), ["", "", "", "number opt", "number", "number"], (cells, row, key) => {
      const names = key.split("|");
      for (const at of [0, 1, 2]) set(cells[at], names[at] || "–");
      set(cells[3], row[0]);
      set(cells[4], bytes(row[1]));
      set(cells[5], bytes(row[2]));
    });
    const counts = Object.create(null);
    for (const one of Object.values(state.workers)) {
      for (const [name, count] of Object.entries(one.links || {})) {
        if (name.split("|")[1]) counts[name] = (counts[name] || 0) + count;
      }
    }
    const texts = Object.entries(counts).slice(0, 12).map(([name, count]) => {
      const [transport, ...reason] = name.split("|");
      return `${plural(count, "connection")} by ${transport}: ${reason.join("|")}`;
    });
    list($("reasons"), texts, "");
  }

  function* showSnapshots() {
    const one = state.snapshots;
    set($("snapshot-text"), !one ? "This run has no storage: without snapshots and copies a lost server loses training."
      : `${one.policy}, in ${one.storage}${one.restored ? `; this run resumed from ${one.restored}` : ""}`);
    const attempt = one && one.attempt;
    const share = attempt && attempt.bytes ? `, ${bytes(attempt.bytes_done)} of ${bytes(attempt.bytes)}` : "";
    const wait = attempt && attempt.waiting_for ? `, waiting for ${attempt.waiting_for}` : "";
    set($("snapshot-attempt"), attempt ? `Saving now: ${attempt.phase}${share}${wait}` : "");
    const committed = ((one && one.committed) || []).slice().sort((a, b) => b.time - a.time);
    yield* rows($("snapshots"), committed.map((each) => [each.directory, each]),
      ["", "", "number", "number", "number", "opt"], (cells, each) => {
        set(cells[0], each.directory);
        set(cells[1], Object.entries(each.steps).map(([name, step]) => `${name} ${step}`).join(", "));
        set(cells[2], duration(serverTime - each.time));
        set(cells[3], bytes(each.bytes));
        set(cells[4], duration(each.seconds));
        set(cells[5], each.reason);
      });
  }

  function* showEvents() {
    const found = Object.entries(state.events).sort(([a], [b]) => b - a);
    yield* rows($("events"), found, ["number", "kind", "text"], (cells, [time, kind, text, warning]) => {
      set(cells[0], clock(time));
      set(cells[1], warning ? `warning: ${kind}` : kind);
      cells[1].className = warning ? "kind warning" : "kind soft";
      set(cells[2], text);
    });
    $("scheduler-log").hidden = Boolean(saved) || !state.run.logs;
    set($("events-omitted"), state.events_omitted ? `${plural(state.events_omitted, "older event")} not shown` : "");
  }

  function* showFacts() {
    yield* rows($("facts"), Object.entries(state.facts || {}), ["", ""], (cells, value, name) => {
      set(cells[0], name);
      set(cells[1], value);
    });
  }

  // --- curves ---

  // Curves besides those of the numbers that scripts report: over all workers, a second.
  const RATES = {
    "samples a second": (one) => one.samples / one.seconds,
    "payload bytes a second": (one) => one.bytes / one.seconds,
  };

  const charts = new Map();
  const sizes = new Map();  // Of the charts. Asking for them would make the browser lay out the page at once.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function points() {
    return $("span").value === "whole" ? curves.whole : curves.recent;
  }

  function showMetrics() {
    const reported = [...new Set(points().flatMap((one) => Object.keys(one.reported)))];
    // The loss is what people look for first.
    reported.sort((a, b) => b.includes("loss") - a.includes("loss") || NAMES.compare(a, b));
    const names = [...reported, ...Object.keys(RATES).filter((name) => points().some((one) => RATES[name](one) > 0))];
    const select = $("metric");
    const shown = [...select.options].map((option) => option.value);
    if (names.join("\n") !== shown.join("\n")) {
      const chosen = select.value || names[0];
      select.replaceChildren(...names.map((name) => {
        const option = make("option", "", name);
        option.value = name;
        return option;
      }));
      if (names.includes(chosen)) select.value = chosen;
    }
    select.disabled = !names.length;
  }

  function* showCurves() {
    showMetrics();
    const metric = $("metric").value;
    const found = points();
    const last = found.at(-1);
    const read = (one, name) => RATES[name] ? RATES[name](one) : one.reported[name]?.value;
    set($("c-reported"), metric ? `${metric}: ${number(last && read(last, metric), 4)}`
      : "The script reports no numbers (context.report)");
    draw("chart-reported", metric ? [metric] : [], found, read);
    const sets = [...new Set(found.flatMap((one) => Object.keys(one.steps)))].sort().slice(0, 6);
    const rate = (one, name) => one.steps[name] / one.seconds;
    const rates = sets.map((name) => `${name} ${number(rate(last, name))}`).join(", ");
    set($("c-rate"), `Updates per second: ${rates || "none yet"}`);
    draw("chart-rate", sets, found, rate);
  }

  const finite = (value) => Number.isFinite(value) ? value : null;

  function draw(id, names, found, read) {
    const size = sizes.get(id);
    if (!size) return;
    const place = $(id);
    const old = charts.get(id);
    const theme = `${document.documentElement.dataset.theme} ${dark.matches}`;
    const key = `${names.join("\n")} ${size.width} ${size.height} ${theme}`;
    const shown = `${found.length} ${found.at(-1)?.time} ${$("span").value}`;
    if (old && old.key === key && old.shown === shown) return;
    const data = [found.map((one) => one.time), ...names.map((name) => found.map((one) => finite(read(one, name))))];
    if (old && old.key === key) { old.chart.setData(data); old.shown = shown; return; }
    if (old) old.chart.destroy();
    const [text, line] = [color("--soft"), color("--line")];
    const strokes = ["--compute", "--push", "--pull", "--accent", "--bad", "--warn"].map(color);
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const chart = new uPlot({
      width: Math.max(200, size.width), height: size.height, cursor: { drag: { x: false, y: false } }, legend: { show: names.length > 1 },
      scales: { x: { time: true } },
      axes: [{ ...axis, space: 100 }, { ...axis, size: 64, values: (_, values) => values.map((value) => number(value, 4)) }],
      series: [{}, ...names.map((name, at) => ({
        label: name, stroke: strokes[at % strokes.length], width: 2, dash: at ? [4 + 3 * at, 3] : undefined,
        points: { show: found.length < 3 }, value: (_, value) => number(value, 4),
      }))],
    }, data, place);
    charts.set(id, { key, shown, chart });
  }

  // --- all ---

  const PANELS = [showHeader, showProblems, showWaits, showWorkers, showServers, showShards, showTraffic,
    showSnapshots, showEvents, showFacts, showCurves];

  // Shows the panels in several frames if they take long, so that the page scrolls meanwhile.
  function show() {
    if (!state || !state.run || document.hidden) { pending = []; scheduled = outdated = false; return; }
    const began = performance.now();
    do {
      try {
        if (pending[0].next().done) pending.shift();
      } catch (error) {  // One panel must not take the others along.
        console.error(PANELS.at(-pending.length).name, error);
        pending.shift();
      }
    } while (pending.length && performance.now() - began < PANELS_MS);
    if (pending.length) { requestAnimationFrame(show); return; }
    showConnection();
    scheduled = false;
    if (outdated) schedule();
  }

  function schedule() {
    outdated = scheduled;  // The panels that are shown already lack the newest state.
    if (scheduled) return;
    scheduled = true;
    const now = performance.now();
    const pause = now - scrolledAt < SCROLL_MS ? shownAt + SCROLLED_SHOW_MS - now : 0;
    if (pause > 0) setTimeout(begin, pause);
    else begin();
  }

  function begin() {
    shownAt = performance.now();
    pending = PANELS.map((panel) => panel());
    requestAnimationFrame(show);
  }

  function showConnection() {
    if (saved) { set($("connection"), `saved ${clock(serverTime)}`); return; }
    const silent = Math.round((performance.now() - heardAt) / 1000);
    const late = silent >= LATE_SECONDS;
    const stalled = state && state.unanswered;
    $("connection").classList.toggle("late", Boolean(refusal || late || stalled));
    if (refusal) set($("connection"), refusal);
    else if (late) set($("connection"), `no news for ${duration(silent)}: the scheduler is gone, or cannot be reached`);
    else if (stalled) set($("connection"), "the scheduler does not answer its dashboard: this state is old");
    else set($("connection"), state ? "live" : "connecting");
  }

  // --- connection ---

  function follow() {
    if (stream) stream.close();
    stream = new EventSource("events");
    stream.onmessage = (event) => receive(JSON.parse(event.data));
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) setTimeout(enter, 3000); };
  }

  async function exchange(secret) {
    const answer = await fetch("session", { method: "POST", headers: { Authorization: `Bearer ${secret}` } });
    return answer.ok;
  }

  async function enter() {
    try {
      const secret = new URLSearchParams(location.hash.slice(1)).get("key");
      if (secret) {
        history.replaceState(null, "", location.pathname);
        await exchange(secret);
      }
      const answer = await fetch("session");
      $("login").hidden = answer.status !== 401;
      refusal = answer.ok ? "" : answer.status === 401 ? "locked" : await answer.text();
      showConnection();
      if (answer.ok) follow();
      else if (answer.status === 401) $("token").focus();
      else setTimeout(enter, 3000);
    } catch (error) {
      setTimeout(enter, 3000);
    }
  }

  $("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    set($("login-error"), "");
    const right = await exchange($("token").value).catch(() => false);
    $("token").value = "";
    if (right) enter();
    else set($("login-error"), "This is not the token of the run. It is in the run's token file, or in PSDIST_TOKEN.");
  });

  // --- controls ---

  const THEMES = { auto: "automatic", light: "light", dark: "dark" };

  function setTheme(name) {
    const chosen = name in THEMES ? name : "auto";
    document.documentElement.dataset.theme = chosen;
    set($("theme"), `Theme: ${THEMES[chosen]}`);
    try { localStorage.setItem("psdist-theme", chosen); } catch (error) { /* Storage is off: this page remembers it. */ }
    schedule();
  }

  let stored = null;
  try { stored = localStorage.getItem("psdist-theme"); } catch (error) { /* As above. */ }
  setTheme(stored || "auto");
  $("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  });
  $("scheduler-log").addEventListener("click", () => showLog("scheduler"));
  $("log-again").addEventListener("click", () => showLog($("log").dataset.member));
  for (const id of ["metric", "span", "only-problems"]) $(id).addEventListener("change", schedule);
  addEventListener("resize", schedule);
  addEventListener("scroll", () => { scrolledAt = performance.now(); }, { capture: true, passive: true });
  dark.addEventListener("change", schedule);
  const observer = new ResizeObserver((all) => {
    for (const { target, contentRect } of all) if (contentRect.width) sizes.set(target.id, contentRect);
    schedule();
  });
  for (const id of ["chart-reported", "chart-rate"]) observer.observe($(id));
  document.addEventListener("visibilitychange", schedule);
  if (saved) {
    document.body.classList.add("is-saved");
    $("span").value = "whole";
    receive(saved);
  } else {
    addEventListener("hashchange", enter);
    setInterval(() => { if (!document.hidden) showConnection(); }, 1000);
    enter();
  }
})();
