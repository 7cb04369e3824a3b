"""Adapters: one module or folder per foreign system, each importing only its own."""
