"""Sphinx reads this from the staged pages that `build.py` makes."""

import re

from kvlab.version import __version__

project, author, release = "kvlab", "the kvlab authors", __version__
copyright = author
extensions = [
    "myst_nb",  # the pages are Markdown, and notebooks are shown with the outputs that they were kept with
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
suppress_warnings = ["mystnb.unknown_mime_type"]
exclude_patterns = ["lab", "_build"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "kvlab"
html_static_path = ["static"]
html_css_files, html_js_files = ["kvlab.css"], ["kvlab.js"]
html_show_sourcelink, html_copy_source = False, False
html_show_search_summary = False  # it fetches every page that is found, which a page opened from a file may not
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    "navigation_depth": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_context = {"default_mode": "auto"}
html_sidebars = {"index": [], "gallery": [], "ledger": []}


def _fences(app, what, name, obj, options, lines):
    """Docstrings are read as reStructuredText; a fenced block of code becomes one there."""
    out, inside = [], False
    for line in lines:
        fence = re.match(r"(\s*)```(\w*)", line)
        if fence:
            inside = not inside
            out += [f"{fence[1]}.. code-block:: {fence[2] or 'text'}", ""] if inside else [""]
        else:
            out.append(f"    {line}" if inside else line)
    lines[:] = out


def setup(app):
    app.connect("autodoc-process-docstring", _fences)
