"""The ``asyncsched`` command."""
