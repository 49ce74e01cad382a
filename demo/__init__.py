"""The main job, run for real: hidden states out of a vLLM engine, for a person to watch.

`python -m demo` starts it and `python -m demo --help` explains it. It reads a real trained
model and real English text, and checks what it extracted against transformers.
"""


class DemoError(Exception):
    """Something the demo cannot go on without; the text names it and the remedy."""
