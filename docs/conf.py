"""How the site is built: `make docs`."""

import gc
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "kernels"), str(HERE / "_ext")]

# A page is a tree of many thousand objects that all stay: looking for garbage among them takes a third of the time to build the site.
gc.disable()

import qsim  # noqa: E402 (from the clone that contains this file)

project = "qsim"
copyright = "2026, the qsim authors"  # noqa: A001 (Sphinx's name)
author = "the qsim contributors"
release = version = qsim.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "accessible",
    "card",
    "claims",
    "drawn",
    "explorer",
    "images",
    "linked_code",
    "links_checked",
    "listed_studies",
    "mathml",
    "members",
    "navigation",
    "notebooks",
    "printed",
    "questions",
    "reports",
    "stacked",
    "versions",
]
exclude_patterns = ["_build", "_drawn"]
templates_path = ["_templates"]

# Markdown.
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# The API: docstrings are Google's style; a name in backticks is a link where there is such a name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Unions that signatures name instead of repeating them.
autodoc_type_aliases = {"Overflow": "qsim.rounding.Overflow", "PointLike": "qsim.recipes.PointLike"}
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
add_module_names = False
viewcode_line_numbers = True

# Every reference must resolve, except words in docstrings' backticks that are not names, and types that are internal or external.
nitpicky = True
nitpick_ignore_regex = [(r"py:obj", r".*"), (r"py:(class|func|meth|exc|attr|data)", r"(?!qsim\.).*"), (r"py:class", r"qsim\.[\w.]*\._?\w+")]

# Looks.
html_theme = "furo"
html_title = "qsim"
html_favicon = "icon.svg"
# Where the site is published: links in other sites' previews need it.
html_baseurl = os.environ.get("SITE_URL", "")
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"loading_method": "defer"}), ("versions.js", {"loading_method": "defer"})]
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b62a8", "color-brand-content": "#0b62a8", "color-brand-visited": "#6a4c93"},
    "dark_css_variables": {"color-brand-primary": "#79b8f3", "color-brand-content": "#79b8f3", "color-brand-visited": "#b79ee0"},
}
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
