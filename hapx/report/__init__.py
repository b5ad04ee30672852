"""Plans as people read them: `table.plan_table`, `compare.compare_table`, `catalogue.catalogue_table`.

Text only: plain ASCII, at most 120 columns, no colours.
"""
