"""The commands before a run: `doctor`, `plan`, `preview` and `rehearse`. They check, measure and report."""
