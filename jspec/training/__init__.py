"""Training drafts: data made by the target, losses of the papers, and one loop."""
