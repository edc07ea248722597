"""Python reads this at its start where the folder is on PYTHONPATH: the pretended device, before torch."""

import os

if os.environ.get("PRETENDED_LIBRARIES"):
    from pretended_device import load

    load(os.environ["PRETENDED_LIBRARIES"], int(os.environ.get("PRETENDED_NUMBERS", "0")))
