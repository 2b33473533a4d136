"""The smallest Django project that has the command: of your own project, keep its manage.py and settings."""
import os

from django.conf import settings
from django.core.management import execute_from_command_line

settings.configure(
    INSTALLED_APPS=["reports"],
    REDIS_URL=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"),
)
execute_from_command_line()
