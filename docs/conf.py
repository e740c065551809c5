"""Sphinx builds the pages of the whole repository: `make docs`. A link that leads nowhere fails the build."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "lyapunov_prune"
extensions = ["myst_nb", "api_pages"]
# The sources begin at the repository, so that links to README.md, lean/ and experiments/ hold here as they do unbuilt.
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**", "lean/README.md", "experiments/README.md", "experiments/**/README.md"]
exclude_patterns = [".*", "build", "runs"]
myst_heading_anchors = 3
# A notebook runs whenever its page is built, in a folder that goes away; a cell that raises fails the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds of one cell
nb_output_stderr = "remove"  # bars of other libraries
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernel: its model is small
highlight_language = "text"
html_theme = "furo"
html_title = project
html_show_copyright = False
add_module_names = False
python_maximum_signature_line_length = 100
