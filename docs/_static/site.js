/* Code and tables that scroll can be reached with the keyboard. */
"use strict";

(() => {
  const update = () => {
    for (const element of document.querySelectorAll(".highlight pre, .table-wrapper, figure.wide"))
      if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
      else element.removeAttribute("tabindex");
  };
  update();
  window.addEventListener("resize", update);
})();
