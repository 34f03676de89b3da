"use strict";

// A menu of the versions of the site, if it has several: versions.json, at the root of each version, lists them.
(async () => {
  if (location.protocol === "file:") return;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const answer = await fetch(new URL("versions.json", root));
  const versions = answer.ok ? await answer.json() : [];
  if (versions.length < 2) return;

  const menu = document.createElement("select");
  menu.className = "versions";
  menu.setAttribute("aria-label", "Version");
  for (const { name, path } of versions) menu.add(new Option(name, path, false, path === ""));

  // The same page in the other version, or its first page if there is none.
  const page = location.pathname.slice(root.pathname.length);
  menu.addEventListener("change", async () => {
    const other = new URL(menu.value, root);
    const same = new URL(page, other);
    const { ok } = await fetch(same, { method: "HEAD" });
    location.href = ok ? same : new URL("index.html", other);
  });
  document.querySelector(".sidebar-brand").after(menu);
})();
