"""After a run: whether it did what was claimed (`verdict`), where two runs part (`divergence`), and where a setting's
value came from (`origins`)."""
