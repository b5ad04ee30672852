"""Pipelines: the model cut into layers, the cluster into submeshes, and the program that assigns one to the other (Alpa, OSDI'22, section 5)."""
