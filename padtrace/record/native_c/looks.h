/* Looks at batches: what changed since the last one, and the snapshot of it; see snapshots.py. */

/* ---- lists and speculative inputs ------------------------------------------------------------ */

/* Whether the lists among the attributes still hold what the snapshot says. */
static int lists_same(Looker *self, PyObject **now, Snapshot *snapshot)
{
    const int64_t *scalars = snapshot->record + 1;
    const int64_t *values = scalars + snapshot->scalar_count;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        const int conversion = self->columns.conversions[i];
        const int64_t code = scalars[self->columns.places[i]];
        PyObject *value = now[i];
        if (conversion == COUNTED && value != Py_None) {
            if (!PyList_CheckExact(value) || PyList_GET_SIZE(value) != code)
                return 0;
        } else if (conversion == VECTOR && value != Py_None) {
            /* One that was not observed is converted again: it may be readable now. */
            if (!is_integers(value) || PyList_GET_SIZE(value) != code)
                return 0;
            for (Py_ssize_t k = 0; k < code; k++) {
                int overflow = 0;
                PyObject *item = PyList_GET_ITEM(value, k);
                if (!PyLong_CheckExact(item) ||
                    PyLong_AsLongLongAndOverflow(item, &overflow) != values[k] || overflow)
                    return 0;
            }
            values += code;
        }
    }
    return 1;
}

/* The attributes of a speculative input now; how many, -1 with an exception set.
 * `held` is its dict or NULL, and becomes NULL if any of them is not in there. */
static Py_ssize_t speculative_now(Speculative *spec, PyObject *object, PyObject **into,
                                  PyObject **held)
{
    PyObject *fields = *held;
    for (Py_ssize_t i = 0; i < spec->columns.count; i++) {
        PyObject *name = PyTuple_GET_ITEM(spec->columns.names, i);
        into[i] = fields == NULL ? NULL : PyDict_GetItemWithError(fields, name);
        Py_XINCREF(into[i]);
        if (into[i] == NULL && !PyErr_Occurred()) {
            *held = NULL;
            into[i] = PyObject_GetAttr(object, name);
        }
        if (into[i] == NULL) {
            while (i-- > 0)
                Py_DECREF(into[i]);
            return -1;
        }
    }
    return spec->columns.count;
}

/* Room for the values of every vector among the attributes. */
static Py_ssize_t vector_room(Looker *self, PyObject **now)
{
    Py_ssize_t room = 0;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        if (self->columns.conversions[i] == VECTOR && is_integers(now[i]))
            room += PyList_GET_SIZE(now[i]);
    }
    return room;
}

/* Copy the vectors; those that are no list of int64 were not observed. The values copied. */
static Py_ssize_t fill_vectors(Looker *self, PyObject **now, int64_t *scalars, int64_t *values,
                               Py_ssize_t room)
{
    Py_ssize_t used = 0;
    for (Py_ssize_t at = 0; at < self->list_count; at++) {
        const Py_ssize_t i = self->lists[at];
        int64_t *code;
        Py_ssize_t count;
        if (self->columns.conversions[i] != VECTOR)
            continue;
        code = &scalars[self->columns.places[i]];
        if (now[i] == Py_None) {
            *code = NONE_CODE;
            continue;
        }
        *code = NOT_OBSERVED_CODE;
        if (!is_integers(now[i]))
            continue;
        count = PyList_GET_SIZE(now[i]);
        if (count > room - used)
            continue;
        *code = count;
        for (Py_ssize_t k = 0; k < count; k++) {
            int overflow = 0;
            PyObject *item = PyList_GET_ITEM(now[i], k);
            if (!PyLong_CheckExact(item)) {
                *code = NOT_OBSERVED_CODE;
                break;
            }
            values[used + k] = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow) {
                *code = NOT_OBSERVED_CODE;
                break;
            }
        }
        if (*code == count)
            used += count;
    }
    return used;
}

/* The snapshot of attributes that differ from the last look; a new reference. */
static Snapshot *looker_convert_all(Looker *self, Look *look, PyObject **now, Speculative *spec,
                                    PyObject **spec_now)
{
    Snapshot *before = look->snapshot, *made;
    Columns *columns = &self->columns;
    int64_t *scalars;
    Py_ssize_t room;
    made = snapshot_make(&SnapshotType, self->scalar_count, vector_room(self, now));
    if (made == NULL)
        return NULL;
    scalars = made->record + 1;
    room = made->value_count;
    memcpy(scalars, before == NULL ? self->blank : before->record + 1,
           sizeof(int64_t) * (size_t)self->scalar_count);
    for (Py_ssize_t i = 0; i < columns->count; i++) {
        int64_t code;
        if (columns->conversions[i] == VECTOR ||
            (before != NULL && now[i] == look->raw[i] && columns->conversions[i] != COUNTED))
            continue;
        code = looker_convert(self, columns, i, now[i]);
        if (code == -1 && PyErr_Occurred())
            goto bad;
        scalars[columns->places[i]] = code;
    }
    if ((before == NULL || now[self->mirror] != look->raw[self->mirror]) &&
        !looker_lengths(self, now[self->mirror], scalars))
        goto bad;
    if (before == NULL || look->spec != spec)
        for (Py_ssize_t i = 0; i < spec->code_count; i++)
            scalars[spec->code_places[i]] = spec->codes[i];
    for (Py_ssize_t i = 0; i < spec->columns.count; i++) {
        int64_t code;
        if (before != NULL && look->spec == spec && look->spec_raw[i] == spec_now[i])
            continue;
        code = looker_convert(self, &spec->columns, i, spec_now[i]);
        if (code == -1 && PyErr_Occurred())
            goto bad;
        scalars[spec->columns.places[i]] = code;
    }
    /* Last, since the code that ran above may have changed a list. */
    made->value_count = fill_vectors(self, now, scalars, scalars + self->scalar_count, room);
    made->record[0] =
        record_head(RECORD_EVENT, SNAPSHOT_KIND, made->scalar_count, made->value_count);
    if (before != NULL && before->value_count == made->value_count &&
        memcmp(before->record, made->record,
               sizeof(int64_t) * (size_t)(1 + made->scalar_count + made->value_count)) == 0) {
        /* Other objects of the same sizes are no other snapshot, and need no other record. */
        Py_DECREF(made);
        Py_INCREF(before);
        return before;
    }
    return made;
bad:
    Py_DECREF(made);
    return NULL;
}

/* The attributes of a batch now, borrowed, by the order in which its dict held them last time.
 * A dataclass sets its fields in one order, so this is one walk instead of a search each. */
static int fetch_in_order(Looker *self, PyObject *fields, PyObject **now)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, at = 0;
    if (self->order_length == 0)
        return 0;
    while (at < self->order_length && PyDict_Next(fields, &position, &key, &value)) {
        if (key != self->order_keys[at])
            return 0;
        if (self->order_columns[at] >= 0)
            now[self->order_columns[at]] = value;
        at++;
    }
    return at == self->order_length;
}

/* Remember the order of the keys up to the last one that is a column. */
static void learn_order(Looker *self, PyObject *fields)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *key, *value;
    Py_ssize_t position = 0, at = 0, found = 0;
    self->order_length = 0;
    while (PyDict_Next(fields, &position, &key, &value) && at < MAX_ORDER) {
        Py_ssize_t column = -1;
        for (Py_ssize_t i = 0; i <= count && column < 0; i++)
            if (key == (i < count ? PyTuple_GET_ITEM(self->columns.names, i) : self->spec_name))
                column = i;
        found += column >= 0;
        Py_INCREF(key);
        Py_XSETREF(self->order_keys[at], key);
        self->order_columns[at++] = column;
        if (found == count + 1) {
            self->order_length = at;
            return;
        }
    }
}

/* The attributes of a batch now, borrowed; 0 if one is missing or an exception is set. */
static int fetch(Looker *self, PyObject *fields, PyObject **now)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    if (fetch_in_order(self, fields, now))
        return 1;
    while (PyDict_Next(fields, &position, &key, &value))
        if (!PyUnicode_CheckExact(key))
            return 0; /* its comparison could run code, while references are borrowed */
    for (Py_ssize_t i = 0; i <= count; i++) {
        PyObject *name = i < count ? PyTuple_GET_ITEM(self->columns.names, i) : self->spec_name;
        now[i] = PyDict_GetItemWithError(fields, name);
        if (now[i] == NULL)
            return 0;
    }
    /* Seldom, since it costs more than the search, and batches may keep no order. */
    if (self->misses++ % 256 == 0)
        learn_order(self, fields);
    return 1;
}

/* Keep a look; what it takes the place of is let go last, since that may run code. */
static void look_keep(Look *into, PyObject *fields, Snapshot *snapshot, Speculative *spec,
                      PyObject **now, Py_ssize_t count, PyObject **spec_now, Py_ssize_t spec_count,
                      PyObject *spec_owner)
{
    Snapshot *old = into->snapshot;
    PyObject *old_owner = into->owner, *old_spec_owner = into->spec_owner,
             *gone[MAX_COLUMNS + 1 + MAX_SPEC_COLUMNS];
    Py_ssize_t gone_count = 0;
    Py_INCREF(snapshot);
    into->snapshot = snapshot;
    Py_INCREF(fields);
    into->owner = fields;
    into->version = into->spec_version = 0;
    Py_XINCREF(spec_owner);
    into->spec_owner = spec_owner;
    into->spec = spec;
    into->spec_count = spec_count;
    for (Py_ssize_t i = 0; i <= count; i++) {
        gone[gone_count++] = into->raw[i];
        Py_INCREF(now[i]);
        into->raw[i] = now[i];
    }
    for (Py_ssize_t i = 0; i < MAX_SPEC_COLUMNS; i++) {
        gone[gone_count++] = into->spec_raw[i];
        into->spec_raw[i] = i < spec_count ? spec_now[i] : NULL;
        Py_XINCREF(into->spec_raw[i]);
    }
    while (gone_count > 0)
        Py_XDECREF(gone[--gone_count]);
    Py_XDECREF((PyObject *)old);
    Py_XDECREF(old_owner);
    Py_XDECREF(old_spec_owner);
}

/* The snapshot of the last look if no dict has changed since, a new reference; else NULL.
 * Lists change in place, so they are compared all the same. */
static Snapshot *look_still(Looker *self, const Look *look, PyObject *fields)
{
    if (look->owner != fields || look->version == 0 || look->version != dict_version(fields) ||
        (look->spec_owner != NULL &&
         (look->spec_version == 0 || look->spec_version != dict_version(look->spec_owner))) ||
        (look->spec_owner == NULL && look->raw[self->columns.count] != Py_None) ||
        !lists_same(self, look->raw, look->snapshot))
        return NULL;
    return (Snapshot *)Py_NewRef(look->snapshot);
}

/* A copy of a look that keeps alive what it refers to: converters may run code that looks again. */
static void look_hold(const Look *look, Look *held, PyObject **raw, PyObject **spec_raw,
                      Py_ssize_t count)
{
    *held = *look;
    held->raw = raw;
    held->spec_raw = spec_raw;
    Py_XINCREF((PyObject *)held->owner);
    Py_XINCREF(held->spec_owner);
    Py_XINCREF((PyObject *)held->snapshot);
    for (Py_ssize_t i = 0; i <= count; i++) {
        raw[i] = look->raw[i];
        Py_XINCREF(raw[i]);
    }
    for (Py_ssize_t i = 0; i < look->spec_count; i++) {
        spec_raw[i] = look->spec_raw[i];
        Py_XINCREF(spec_raw[i]);
    }
}

/* What one object's attributes are now; see looker_look. */
typedef struct {
    PyObject *fields, **attributes;
    Speculative *spec;
    PyObject **spec_attributes, *spec_owner;
    Py_ssize_t spec_count;
} Present;

/* Convert what changed since a look at another object, which stays what it is. */
static Snapshot *look_anew(Looker *self, Look *base, Look *into, const Present *now)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *raw[MAX_COLUMNS + 1], *spec_raw[MAX_SPEC_COLUMNS];
    Snapshot *found;
    Look held;
    for (Py_ssize_t i = 0; i <= count; i++)
        Py_INCREF(now->attributes[i]);
    look_hold(base, &held, raw, spec_raw, count);
    found = looker_convert_all(self, &held, now->attributes, now->spec, now->spec_attributes);
    if (found != NULL)
        look_keep(into, now->fields, found, now->spec, now->attributes, count, now->spec_attributes,
                  now->spec_count, now->spec_owner);
    look_clear(&held, count);
    for (Py_ssize_t i = 0; i <= count; i++)
        Py_DECREF(now->attributes[i]);
    return found;
}

/* Put what changed into a look that was taken out; what it lets go is given to `gone`. */
static Py_ssize_t look_renew(Look *held, Snapshot *found, const Present *now, const int *changed,
                             Py_ssize_t changed_count, PyObject **gone)
{
    Py_ssize_t gone_count = 0;
    for (Py_ssize_t k = 0; k < changed_count; k++) {
        gone[gone_count++] = held->raw[changed[k]];
        held->raw[changed[k]] = now->attributes[changed[k]];
    }
    for (Py_ssize_t i = 0; i < MAX_SPEC_COLUMNS && (i < held->spec_count || i < now->spec_count);
         i++) {
        gone[gone_count++] = held->spec_raw[i];
        held->spec_raw[i] = i < now->spec_count ? Py_NewRef(now->spec_attributes[i]) : NULL;
    }
    gone[gone_count++] = (PyObject *)held->snapshot;
    held->snapshot = (Snapshot *)Py_NewRef(found);
    gone[gone_count++] = held->spec_owner;
    Py_XINCREF(now->spec_owner);
    held->spec_owner = now->spec_owner;
    held->spec = now->spec;
    held->spec_count = now->spec_count;
    return gone_count;
}

/* Convert what changed since the last look at the same object.
 *
 * The look is taken out while code of Python may run, so what did not change need not be touched:
 * its objects are mostly in no cache. */
static Snapshot *look_again(Looker *self, Look *look, const Present *now)
{
    PyObject *gone[MAX_COLUMNS + MAX_SPEC_COLUMNS + 3];
    Look held = *look, meanwhile;
    int changed[MAX_COLUMNS + 1];
    Py_ssize_t changed_count = 0, gone_count = 0;
    Snapshot *found;
    for (Py_ssize_t i = 0; i <= self->columns.count; i++)
        if (now->attributes[i] != held.raw[i]) {
            Py_INCREF(now->attributes[i]);
            changed[changed_count++] = (int)i;
        }
    memset(look, 0, sizeof(*look));
    look->raw = self->spare_raw;
    look->spec_raw = self->spare_spec_raw;
    self->spare_raw = self->spare_spec_raw = NULL;
    found = looker_convert_all(self, &held, now->attributes, now->spec, now->spec_attributes);
    if (found != NULL)
        gone_count = look_renew(&held, found, now, changed, changed_count, gone);
    else
        for (Py_ssize_t k = 0; k < changed_count; k++)
            gone[gone_count++] = now->attributes[changed[k]];
    held.version = held.spec_version = 0;
    meanwhile = *look;
    *look = held;
    look_clear(&meanwhile, self->columns.count);
    self->spare_raw = meanwhile.raw;
    self->spare_spec_raw = meanwhile.spec_raw;
    while (gone_count > 0)
        Py_XDECREF(gone[--gone_count]);
    return found;
}

/* A look at attributes that are all there; the speculative input is held by the caller. */
static PyObject *looker_look(Looker *self, PyObject *fields, PyObject *spec_input)
{
    const Py_ssize_t count = self->columns.count;
    PyObject *now[MAX_COLUMNS + 1], *spec_now[MAX_SPEC_COLUMNS], *spec_owner = NULL, *held_owner;
    Look *look = &self->looks[self->last];
    uint64_t version = dict_version(fields), spec_version = 0;
    Py_ssize_t spec_count;
    Speculative *spec;
    Snapshot *found = NULL;
    if (look->owner != fields) {
        /* SGLang goes back and forth between a batch and its padded copy. */
        self->last = 1 - self->last;
        if (self->looks[self->last].owner == fields)
            look = &self->looks[self->last];
    }
    spec = looker_speculative(self, spec_input);
    if (spec == NULL)
        return NULL;
    if (spec_input != Py_None) {
        spec_owner = PyObject_GetAttr(spec_input, text_dict);
        if (spec_owner == NULL && !forgive())
            return NULL;
        if (spec_owner != NULL && !PyDict_CheckExact(spec_owner))
            Py_CLEAR(spec_owner);
        if (spec_owner != NULL)
            spec_version = dict_version(spec_owner);
    }
    held_owner = spec_owner;
    spec_count = speculative_now(spec, spec_input, spec_now, &held_owner);
    if (spec_count < 0) {
        Py_XDECREF(spec_owner);
        return NULL;
    }
    /* From here to the comparison no code of Python runs, so borrowed references will do. */
    if (!fetch(self, fields, now)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_KeyError, "an attribute is missing");
    } else if (look->owner == fields && look->spec == spec &&
               memcmp(now, look->raw, sizeof(PyObject *) * (size_t)(count + 1)) == 0 &&
               memcmp(spec_now, look->spec_raw, sizeof(PyObject *) * (size_t)spec_count) == 0 &&
               lists_same(self, now, look->snapshot)) {
        found = look->snapshot;
        Py_INCREF(found);
    } else {
        const Present present = {fields, now, spec, spec_now, held_owner, spec_count};
        found = look->owner == fields && look->snapshot != NULL && self->spare_raw != NULL
                    ? look_again(self, look, &present)
                    : look_anew(self, look, &self->looks[self->last], &present);
    }
    look = &self->looks[self->last];
    if (found != NULL && look->owner == fields && look->snapshot == found) {
        /* As they were before anything was read: a change since then shows. */
        look->version = version;
        look->spec_version = spec_version;
    }
    for (Py_ssize_t i = 0; i < spec_count; i++)
        Py_DECREF(spec_now[i]);
    Py_XDECREF(spec_owner);
    return (PyObject *)found;
}

static PyObject *looker_take(Looker *self, PyObject *batch)
{
    PyObject *fields = PyObject_GetAttr(batch, text_dict), *spec_input = NULL, *found = NULL;
    if (fields != NULL && PyDict_CheckExact(fields)) {
        for (int i = 0; i < 2 && found == NULL; i++) {
            found = (PyObject *)look_still(self, &self->looks[i], fields);
            if (found != NULL)
                self->last = i;
        }
    }
    if (found == NULL && fields != NULL && PyDict_CheckExact(fields))
        spec_input = PyDict_GetItemWithError(fields, self->spec_name);
    if (spec_input != NULL) {
        Py_INCREF(spec_input);
        found = looker_look(self, fields, spec_input);
        Py_DECREF(spec_input);
    }
    Py_XDECREF(fields);
    if (found != NULL)
        return found;
    /* Attributes are missing: the slow way knows which may. */
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_KeyError) &&
        !(fields == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)))
        return NULL;
    PyErr_Clear();
    return PyObject_CallOneArg(self->partial, batch);
}

/* Let go of what the last looks saw. */
static void looker_let_go(Looker *self)
{
    self->last = 0;
    look_clear(&self->looks[0], self->columns.count);
    look_clear(&self->looks[1], self->columns.count);
}

static PyObject *looker_forget(Looker *self, PyObject *unused)
{
    looker_let_go(self);
    Py_RETURN_NONE;
}

/* The columns of this Looker from the attributes of an object, into an array; 0 with an exception.
 * Attributes are converted one by one, so nothing borrowed is held while code of Python runs. */
static int looker_read(Looker *self, PyObject *object, int64_t *into)
{
    Columns *columns = &self->columns;
    for (Py_ssize_t i = 0; i < columns->count; i++) {
        PyObject *value = PyObject_GetAttr(object, PyTuple_GET_ITEM(columns->names, i));
        int64_t code;
        if (value == NULL)
            return 0;
        code = looker_convert(self, columns, i, value);
        Py_DECREF(value);
        if (code == -1 && PyErr_Occurred())
            return 0;
        into[columns->places[i]] = code;
    }
    return 1;
}

static PyMethodDef looker_methods[] = {
    {"take", (PyCFunction)looker_take, METH_O, NULL},
    {"forget", (PyCFunction)looker_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LookerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "padtrace.record._native.Looker",
    .tp_basicsize = sizeof(Looker),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = looker_new,
    .tp_dealloc = (destructor)looker_dealloc,
    .tp_methods = looker_methods,
};
