"""Sphinx builds the site from the pages of this folder and from the docstrings of the package.

The pages are markdown that also reads well on GitHub. ``docs/reference`` lists the public names; what it says of them
is in their docstrings.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

import dtensor_gtp

project = "dtensor_gtp"
release = dtensor_gtp.__version__
copyright = "the dtensor_gtp contributors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# --- pages ------------------------------------------------------------------------------------------------------------

myst_heading_anchors = 4  # by GitHub's rule, so that links to headings work there and here
copybutton_exclude = ".linenos, .gp, .go"  # no prompts, no output

# --- docstrings -------------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
_NAMES = ("ExchangeKind", "Memory", "ReduceScatterKind", "ReduceScatterName")
autodoc_type_aliases = {name: f"dtensor_gtp.policy.{name}" for name in _NAMES}
# dtensor_gtp.integrations: documented alike whether these libraries are installed or not.
autodoc_mock_imports = ["accelerate", "lightning", "torchtitan", "transformers"]
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# --- the look ---------------------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "dtensor_gtp"
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,  # functions and classes of the reference, too
    "navigation_with_keys": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


def setup(app: Any) -> None:
    app.connect("object-description-transform", _shorten_types, priority=900)  # after the types were put in
    app.connect("autodoc-process-signature", _public_signature)


def _shorten_types(app: Any, domain: str, objtype: str, content: nodes.Element) -> None:
    """Show ``type[~package.Name]`` as ``type[Name]``: Sphinx makes no link of a type that also has a ``Literal``."""
    for text in [text for text in content.findall(nodes.Text) if "[~" in text]:
        text.parent.replace(text, nodes.Text(re.sub(r"~(\w+\.)+", "", text)))


def _public_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> Any:
    """Leave out the private fields of dataclasses, which stand last."""
    is_class = what == "class" and signature is not None
    return (re.sub(r", _[a-z].*\)$", ")", signature) if is_class else signature), returns
