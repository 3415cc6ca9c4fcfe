"""What the parts of the shop share. The factory in ``app.py`` sets it up."""

from flask_login import LoginManager
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from flask_wtf import CSRFProtect
from sqlalchemy.orm import DeclarativeBase

from flask_idempotency import Idempotency


class Base(DeclarativeBase):
    """The base of all models."""


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
login_manager = LoginManager()
csrf = CSRFProtect()
idempotency = Idempotency()
