"use strict";
// What the service shows of itself, read again every two seconds. It changes nothing.
// Whatever comes from the service is put in as text, never as markup.

const REFRESH_MS = 2000;
const NEWEST = 10;   // rows of a gallery's history that are shown
const COLOURS = ["#0969da", "#1a7f37", "#bf8700", "#8250df", "#cf222e", "#0a7b83", "#bc4c00", "#6e7781"];
const GONE = "#afb8c1";  // of a version that was removed
const page = document.getElementById("page");
let order = [];      // names of versions as they were registered: each has its colour
let looks = 0;       // number of the newest view: what older ones still wait for is dropped
let timer = null;

class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...(options.headers || {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(`v1/${path}`, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.detail || `status ${answer.status}`);
}

const read = async (path, options) => (await ask(path, options)).json();
const post = (path, body) => read(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
});
const place = (...parts) => parts.map(encodeURIComponent).join("/");

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;  // typed by somebody, as in #/gallery/100%
  }
}

// Elements

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "polyline", "polygon", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(
    (child) => (child instanceof Node ? child : String(child))));
  return made;
}

const chip = (text, kind = text) => el("span", { class: `chip ${kind}` }, text);
const colour = (version) => (order.includes(version) ? COLOURS[order.indexOf(version) % COLOURS.length] : GONE);
const count = (number) => Number(number).toLocaleString("en");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const score = (one) => (one ? `${percent(one.value)} [${(100 * one.low).toFixed(1)}, ${(100 * one.high).toFixed(1)}]` : "");
const moment = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "");

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function table(heads, rows, none) {
  if (!rows.length) return el("p", { class: "note" }, none);
  return el("div", { class: "table" }, el("table", {},
    el("tr", {}, heads.map((head) => el("th", {}, head))),
    rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))));
}

function dot(version) {
  return el("svg", { class: "dot", viewBox: "0 0 10 10" }, el("circle", { cx: 5, cy: 5, r: 5, fill: colour(version) }));
}

function bar(parts, total) {
  let x = 0;
  const rects = parts.filter(([, n]) => n > 0).map(([name, n, fill]) => {
    const width = 1000 * n / Math.max(total, 1);
    x += width;
    return el("rect", { x: x - width, y: 0, width, height: 10, fill }, el("title", {}, `${name}: ${count(n)}`));
  });
  const label = parts.map(([name, n]) => `${name}: ${count(n)}`).join(", ") || "nothing";
  return el("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    el("rect", { x: 0, y: 0, width: 1000, height: 10, fill: "#eff2f5" }), rects);
}

const mixOf = (gallery) => Object.entries(gallery.mix).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
const mixBar = (gallery) => bar(mixOf(gallery).map(([name, n]) => [name, n, colour(name)]), gallery.items);

function curve({ points }) {
  const low = Math.min(...points.map((point) => point.low)), high = Math.max(...points.map((point) => point.high));
  const y = (value) => 100 * (high - value) / Math.max(high - low, 1e-9);
  const line = (list, of) => list.map((point) => `${1000 * point.share},${y(of(point))}`).join(" ");
  const interval = [line(points, (point) => point.high), line([...points].reverse(), (point) => point.low)].join(" ");
  return el("div", { class: "curve" },
    el("div", { class: "scale" }, el("span", {}, percent(high)), el("span", {}, percent(low))),
    el("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" },
      el("rect", { x: 0, y: 0, width: 1000, height: 100, fill: "#f6f8fa" }),
      el("polygon", { points: interval, fill: "#b6e3ff" }),
      el("polyline", {
        points: line(points, (point) => point.value), fill: "none", stroke: "#0969da", "stroke-width": 2,
        "vector-effect": "non-scaling-stroke",
      })),
    el("div", { class: "shares" }, el("span", {}, "0 % of the items moved"), el("span", {}, "100 %")));
}

const newest = (list) => list.slice(-NEWEST).reverse();
const more = (list, command) => (list.length > NEWEST ? el("p", { class: "note" }, `The newest ${NEWEST}. ${command} lists all.`) : null);

function gateLink(gallery, gate) {
  if (!gate || sessionStorage.getItem("key") !== null) return gate || "";  // a browser sends no key with a link
  return el("a", { href: `v1/${place("galleries", gallery, "gates", gate, "page")}`, title: "gate report" }, gate);
}

// Views: each gives what is shown now; that of a gallery gives two parts, above and below the search

async function showGalleries() {
  const { galleries } = await read("galleries");
  return [[el("h1", {}, "Galleries"), table(
    ["gallery", "current version", "items", "served by", "index"],
    galleries.map((one) => [
      el("a", { href: `#/gallery/${encodeURIComponent(one.name)}` }, one.name),
      one.current ? [dot(one.current), one.current] : el("span", { class: "note" }, "none"),
      count(one.items), mixBar(one), one.loading ? `loading, ${count(one.loading.done)} items` : one.index.kind,
    ]),
    "No galleries yet: regraft gallery create NAME")]];
}

async function showGallery(name) {
  const [gallery, { deployments }, { backfills }, { gates }] = await Promise.all(
    ["", "/deployments", "/backfills", "/gates"].map((part) =>
      read(`${place("galleries", name)}${part && `${part}?limit=${NEWEST + 1}`}`)));
  return [[
    el("h1", {}, name, " ", gallery.current ? chip(gallery.current, "current") : chip("no version yet", "warn")),
    mixBar(gallery),
    el("div", { class: "legend" }, mixOf(gallery).map(([version, n]) =>
      el("span", {}, dot(version), `${version}: ${count(n)} (${percent(n / Math.max(gallery.items, 1))})`))),
    el("p", { class: "note" }, `${count(gallery.items)} items, ${count(gallery.indexed)} of them in an approximate index `,
      `(${gallery.index.kind}, ${gallery.index.storage}, recall ${gallery.index.recall})`),
  ], [
    el("h2", {}, "Backfills"),
    table(["", "to", "kind", "state", "moved", "", "failed", "left"], newest(backfills).map((one) => [
      one.id, [dot(one.version), one.version], one.kind, chip(one.planning ? "planning" : one.state, one.state),
      `${count(one.done)} of ${count(one.total)}`, bar([["moved", one.done, colour(one.version)]], one.total),
      count(one.failed), one.state === "running" ? duration(one.eta_seconds) : ""]),
    "No backfills: older items are compared across versions."),
    more(backfills, `regraft backfill list ${name}`),
    newest(backfills).filter((one) => one.curve && one.curve.points.length).slice(0, 1).map((one) => [
      el("p", { class: "note" }, `${one.curve.metric} along backfill ${one.id}: `,
        `${score(one.curve.points[0])} → ${score(one.curve.points.at(-1))}, largest dip ${percent(one.curve.largest_dip)}`),
      curve(one.curve)]),
    el("h2", {}, "Deployments"),
    table(["", "version", "before", "state", "gate", "when", "why"], newest(deployments).map((one) => [
      one.id, [dot(one.version), one.version], one.previous || "", chip(one.state), gateLink(name, one.gate),
      moment(one.created), one.reason]), "No deployments: regraft deploy GALLERY VERSION"),
    more(deployments, `regraft deployment list ${name}`),
    el("h2", {}, "Gates"),
    table(["", "versions", "verdict", "metric", "old/old", "new/old", "new/new", "difference", "flips"],
      newest(gates).map((one) => [
        gateLink(name, one.id), `${one.current} → ${one.version}`, chip(one.verdict), one.metric, score(one.old_old), score(one.new_old),
        score(one.new_new), score(one.difference), count(one.negative_flips)]),
      "No gates: regraft gate GALLERY VERSION"),
    more(gates, `GET /v1/${place("galleries", name)}/gates`),
  ]];
}

async function showVersions() {
  const [{ versions }, { edges }] = await Promise.all([read("versions"), read("edges")]);
  return [[
    el("h1", {}, "Versions"),
    table(["version", "dimension", "space", "method", "inputs", "registered", ""], versions.map((one) => [
      [dot(one.name), one.name], one.dim, one.space.kind, one.method,
      [one.encoder ? "images " : "", one.text ? "texts " : "", one.encoder || one.text ? "" : "embeddings"].join(""),
      moment(one.created), one.problem ? el("span", { class: "error" }, one.problem) : ""]), "No versions registered."),
    el("h2", {}, "Edges"),
    table(["from", "to", "kind", "measured"], edges.map((one) => [
      one.new, one.old, one.kind,
      Object.entries(one.scores).map(([metric, value]) => `${metric} ${score(value)}`).join(", ")]),
    "No edges: versions cannot be compared with each other."),
  ]];
}

async function showAudit() {
  const { audit } = await read("audit?limit=100");
  return [[el("h1", {}, "Audit"), table(["when", "who", "action", "subject", "why"],
    audit.map((one) => [moment(one.at), one.who, one.action, one.subject, one.why]), "No changes yet.")]];
}

// Search: beside what is read again and again, and left as it is

function searchBox(name) {
  const found = el("div", { class: "matches" });
  const told = el("p", { class: "error" });
  // Of a text and an image, the one given last is searched with.
  const text = el("input", {
    type: "text", placeholder: "a text, or an item's id", "aria-label": "query", input: () => { file.value = ""; },
  });
  const kind = el("select", { "aria-label": "kind of query" },
    el("option", { value: "texts" }, "text"), el("option", { value: "items" }, "similar to item"));
  const file = el("input", {
    type: "file", accept: "image/*", "aria-label": "query image", change: () => { text.value = ""; },
  });
  let searches = 0;  // what an earlier one finds later is dropped
  const search = async (event) => {
    event.preventDefault();
    const mine = ++searches;
    told.replaceChildren();
    const path = `${place("galleries", name)}/query`;
    try {
      let answer;
      if (file.files.length) {
        const form = new FormData();
        form.append("images", file.files[0], "0");
        for (const [field, value] of [["k", 12], ["with_text", true]]) form.append(field, String(value));
        answer = await read(path, { method: "POST", body: form });
      } else {
        answer = await post(path, { [kind.value]: [text.value], k: 12, with_text: true });
      }
      if (mine !== searches) return;
      const { degraded } = answer;
      told.append(...(degraded || []).map((one) => `left out: ${count(one.items)} items of ${one.version}: ${one.reason}. `));
      found.replaceChildren(...answer.results[0].matches.map((match) => card(name, match)));
    } catch (error) {
      if (mine !== searches) return;
      found.replaceChildren();
      told.append(error.message);
    }
  };
  return [el("h2", {}, "Search"), el("form", { submit: search }, text, kind, file, el("button", {}, "Search")), told, found];
}

function card(name, match) {
  const image = el("img", { alt: "" });
  const made = el("div", { class: "match" }, image,
    el("p", {}, el("b", {}, match.id)),
    el("p", {}, dot(match.version), `${match.version} · ${match.score.toFixed(4)}`),
    match.text ? el("p", {}, match.text.slice(0, 300)) : null,
    Object.keys(match.metadata).length ? el("p", { class: "note" }, JSON.stringify(match.metadata).slice(0, 300)) : null);
  ask(`${place("galleries", name, "items", match.id)}/image?${new URLSearchParams({ confirm: match.id })}`).then((answer) => answer.blob()).then((blob) => {
    image.addEventListener("load", () => URL.revokeObjectURL(image.src));
    image.src = URL.createObjectURL(blob);
  }).catch(() => image.remove());
  return made;
}

// What is shown: by the part of the address behind #

function signIn(refused) {
  looks += 1;
  clearTimeout(timer);
  // No header can carry another key: it would be refused here again and again, and never asked for anew.
  const key = el("input", {
    type: "password", "aria-label": "API key", autocomplete: "current-password", pattern: "[ -~]*", title: "printable ASCII",
  });
  const enter = (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", key.value.trim());
    show();
  };
  page.replaceChildren(el("h1", {}, "API key"),
    el("p", { class: "note" }, "The scope query is enough, but for the audit. The key is kept until this tab is closed."),
    el("form", { submit: enter }, key, el("button", {}, "Enter")),
    el("p", { class: "error" }, sessionStorage.getItem("key") ? refused.message : ""));
}

async function showState() {
  const state = document.getElementById("state");
  document.getElementById("docs").hidden = sessionStorage.getItem("key") !== null;  // a browser sends no key there
  try {
    const { status, problems } = await read("health/ready");
    state.hidden = false;
    state.replaceChildren(chip(status));
    state.title = problems.join("\n");
  } catch (error) {
    // To a key of some galleries the state of all is not told.
    state.hidden = error.status === 403;
    state.replaceChildren(chip(error.status === 401 ? "API key required" : "not ready", "refuse"));
    state.title = error.message;
  }
}

async function show() {
  const look = ++looks;
  clearTimeout(timer);
  const [, view, name] = (location.hash || "#/").split("/").map(decoded);
  const views = { "": showGalleries, gallery: () => showGallery(name), versions: showVersions, audit: showAudit };
  const above = el("section"), below = el("section"), told = el("p", { class: "error" });
  document.title = view === "gallery" ? `${name} - Regraft` : "Regraft";
  page.replaceChildren(told, above, ...(view === "gallery" ? searchBox(name) : []), below);
  const refresh = async () => {
    try {
      order = (await read("versions")).versions.map((one) => one.name);
      const [first, second = []] = await (views[view] || showGalleries)();
      if (look !== looks) return;
      for (const [section, parts] of [[above, first], [below, second]]) {
        const made = el("section", {}, parts.flat(3));
        // What is the same stays, with the focus, the selection and the place to which a table was scrolled.
        if (!section.isEqualNode(made)) section.replaceChildren(...made.childNodes);
      }
      told.replaceChildren();
    } catch (error) {
      if (look !== looks) return;
      if (error.status === 401) {
        signIn(error);
        return void showState();
      }
      const other = el("button", { click: () => signIn(error) }, "Another key");
      told.replaceChildren(error.message, ...(error.status === 403 ? [" ", other] : []));
    }
    await showState();
    if (look === looks) timer = setTimeout(refresh, REFRESH_MS);
  };
  await refresh();
}

addEventListener("hashchange", show);
show();
