"""Pipeline schedules as data: made, checked, drawn and simulated without any tensor.

schedule = make("1f1b", groups=(0, 1, 2), crossings=[Crossing(0, 1), Crossing(1, 2)], micro_batches=(8, 8, 8, 8))
check(schedule, (0, 1, 2), [Crossing(0, 1), Crossing(1, 2)])
print(grid(schedule))
timetable(schedule, Seconds(forward=(1.0, 1.0, 2.0), backward=(2.0, 2.0, 4.0))).total
"""

from hapx.schedules.check import check, in_flight, received_ahead
from hapx.schedules.delivered import delivered
from hapx.schedules.grid import grid
from hapx.schedules.make import make
from hapx.schedules.orders import promised
from hapx.schedules.styles import Crossing, Style, crossings_between, groups_of, tied_stages
from hapx.schedules.timetable import Seconds, Span, Timetable, duration_of, timetable
from hapx.schedules.warm import everywhere, hidings, nearby, patient

__all__ = [
    "Crossing", "Style", "make", "check", "in_flight", "received_ahead", "promised", "grid", "delivered",
    "Seconds", "Span", "Timetable", "timetable", "duration_of", "everywhere", "hidings", "nearby", "patient", "crossings_between",
    "groups_of", "tied_stages",
]  # fmt: skip
