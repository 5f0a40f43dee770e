"""Stubs generated from proto/ (make stubs); never edited by hand."""
