"""Bundled policies. They are loaded by name like any installed plugin and get no private door."""
