"""What all tests have in common."""

from __future__ import annotations

import signal

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
