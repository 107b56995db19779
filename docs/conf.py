"""Configuration of the site. `make docs` builds it, and runs every block of every page."""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER / "_ext"), str(FOLDER.parent)]

# Before jax is imported, here and in the processes that run the pages: with a warm compilation
# cache, jaxlib 0.10 reports preferences of its compiler as missing features of the processor.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import functrain

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "_build" / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

project = "functrain"
author = "The functrain authors"
copyright = f"2026, {author}"
version = release = functrain.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "pages",
    "guides",
    "api",
]
exclude_patterns = ["_build", "_ext", "guides/*/*.ipynb"]
nitpicky = True

# Pages are plain markdown; `pages` makes notebooks of those with code.
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 600
nb_execution_show_tb = True  # `pages` raises it, with page and line
nb_merge_streams = True
nb_render_text_lexer = "none"

# A word in single backticks is a link where it names something public, and code where not (`api`).
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "class"
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_google_docstring = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_baseurl = os.environ.get(
    "READTHEDOCS_CANONICAL_URL", "https://functrain.readthedocs.io/en/latest/"
)
html_title = f"functrain {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_view_link": "",
    "light_css_variables": {"font-stack--monospace": "ui-monospace, Menlo, Consolas, monospace"},
}
