r"""A Django command that runs once in a fleet: every host's cron starts it at the same time, and one of them does the work.

    python manage.py nightly_report "$(date +\%F)"

The others wait in the queue of the lock, then find that the day's report is done. If the process that works is killed, its lock ends a lease
later, and the next one does the work.
"""
import os
import time
from typing import Any

import holdfast
import redis
from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser


class Command(BaseCommand):
    help = "Makes the report of a day, once in the fleet"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("day")

    def handle(self, *, day: str, **options: Any) -> None:
        client = redis.Redis.from_url(settings.REDIS_URL, decode_responses=True)
        done = f"report:{day}:done"
        with holdfast.Holdfast(client) as locks, locks.lock("report", lease=5) as hold:
            if client.exists(done):
                self.stdout.write(f"{day} is done")
                return
            for part in ("orders", "invoices"):
                hold.check()  # LockLostError: another host has the lock, and begins anew.
                client.rpush("report:log", f"{day} {part}")
                time.sleep(float(os.environ.get("SECONDS", "0")))  # Stands for the work.
            hold.check()
            client.set(done, 1, ex=7 * 86400)
            self.stdout.write(f"{day}: reported")
