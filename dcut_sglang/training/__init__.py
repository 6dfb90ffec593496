"""Training of DFlash drafters: the module, its loss, its fitting and its offline evaluation."""
