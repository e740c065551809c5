"""How much goes where, one file a schedule; `allocation.table.SCHEDULES` lists them."""
