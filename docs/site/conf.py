"""Sphinx reads this from the staged pages that `build.py` makes."""

import importlib
import re
from functools import reduce

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

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
    "header_links_before_dropdown": 8,
    "show_prev_next": False,
    "navigation_depth": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_context = {"default_mode": "auto"}
html_sidebars = {page: [] for page in ("index", "docs/start", "gallery", "ledger", "reference")}

# Where types of other libraries are explained. An inventory of theirs would have to be fetched for each build.
PYTHON, TORCH, PANDAS = (
    "docs.python.org/3/library",
    "docs.pytorch.org/docs/stable",
    "pandas.pydata.org/docs/reference/api",
)
ELSEWHERE = {
    "Path": f"{PYTHON}/pathlib.html#pathlib.Path",
    "PathLike": f"{PYTHON}/os.html#os.PathLike",
    **{
        name: f"{PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Hashable", "Iterable", "Mapping", "Sequence")
    },
    "Tensor": f"{TORCH}/tensors.html#torch.Tensor",
    "Module": f"{TORCH}/generated/torch.nn.Module.html",
    "DataFrame": f"{PANDAS}/pandas.DataFrame.html",
    "Series": f"{PANDAS}/pandas.Series.html",
}


def _type(app, env, node, shown):
    """Link a type in a signature that lacks its full name: to the only object of its last name, or to another site."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("class", "obj"):
        return None
    last = node["reftarget"].rpartition(".")[2]
    if last in ELSEWHERE:
        return nodes.reference("", "", shown, internal=False, refuri=f"https://{ELSEWHERE[last]}")
    held = env.domains["py"].objects.items()
    kinds = ("class", "data", "exception")
    found = {(each.docname, each.node_id) for name, each in held if name.endswith(f".{last}") and each.objtype in kinds}
    if len(found) != 1:
        return None
    ((page, place),) = found
    return make_refnode(app.builder, node["refdoc"], page, place, shown)


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


def _short_places(app, doctree):
    """More places for a name of ours: as if its module, and each package around it, handed it on.

    A module's source links back to all of its names in one way, that of the first, which may be one that is handed on.
    """
    taken = {place for node in doctree.findall(addnodes.desc_signature) for place in node["ids"]}
    for node in doctree.findall(addnodes.desc_signature):
        module, name = str(node.get("module")), str(node.get("fullname"))
        if module.partition(".")[0] != "kvlab":
            continue
        made = reduce(lambda held, part: getattr(held, part, None), name.split("."), importlib.import_module(module))
        for home in (module, str(getattr(made, "__module__", ""))):
            parts = home.split(".")
            for count in range(1, len(parts) + 1) if parts[0] == "kvlab" else ():
                place = ".".join([*parts[:count], name])
                if place not in taken:
                    node["ids"].append(place)
                    taken.add(place)


def _modules_with_source(app):
    """The index of sources without modules that have none: an alias of `tuple[...]` counts as a builtin."""
    held = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, source in held.items() if not source]:
        del held[name]
    return ()


def setup(app):
    app.connect("autodoc-process-docstring", _fences)
    app.connect("missing-reference", _type)
    app.connect("doctree-read", _short_places)
    app.connect("html-collect-pages", _modules_with_source, priority=400)  # before viewcode's own
