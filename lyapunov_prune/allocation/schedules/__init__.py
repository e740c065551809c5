"""Schedules, one file each; `allocation.table.SCHEDULES` lists them."""
