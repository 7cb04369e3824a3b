"""What runs inside every SGLang worker: a receiver over its live model, and the hooks that keep it from serving what
was not committed.
"""
