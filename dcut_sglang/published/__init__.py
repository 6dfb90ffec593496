"""What the D-Cut page reports, recomputed from its own tables by the cost model and selector."""
