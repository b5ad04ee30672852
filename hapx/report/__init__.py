"""Plans as people read them. Text only: plain ASCII, at most 120 columns, no colours."""

from hapx.report.compare import compare_table
from hapx.report.table import plan_table

__all__ = ["compare_table", "plan_table"]
