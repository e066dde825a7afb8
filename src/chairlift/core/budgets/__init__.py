"""Token budgets: how many tokens a step may compute."""
